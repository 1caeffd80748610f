"""`batchgen run`: generates a completion for every row."""

from __future__ import annotations

import typer

from batchgen_cli import options as o
from batchgen_cli import values as v
from batchgen_cli.failures import reported
from batchgen_cli.progress import calm_libraries, progress_for


def run(
    inputs: o.Inputs,
    model: o.Model,
    revision: o.Revision = None,
    dtype: o.DtypeOption = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    prompt_column: o.PromptColumn = "prompt",
    messages_column: o.MessagesColumn = "messages",
    id_column: o.IdColumn = None,
    template: o.Template = None,
    prefix: o.Prefix = None,
    chat: o.Chat = None,
    system: o.System = None,
    chat_template: o.ChatTemplate = None,
    chat_template_kwargs: o.ChatTemplateKwargs = None,
    on_long_prompt: o.OnLongPrompt = "error",
    row_params: o.RowParams = None,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    ignore_eos: o.IgnoreEos = False,
    seed: o.Seed = 0,
    token_ids: o.TokenIds = False,
    chunk_size: o.ChunkSize = 16,
    batch_size: o.BatchSize = "auto",
    max_batch_tokens: o.MaxBatchTokens = "auto",
    max_prefill_tokens: o.MaxPrefillTokens = "auto",
    kv_memory: o.KvMemory = "auto",
    window: o.Window = None,
    share: o.Share = True,
    debug: o.Debug = False,
    output: o.Output = None,
    input_format: o.InputFormat = None,
    limit: o.Limit = None,
    order: o.OrderOption = "input",
    overwrite: o.Overwrite = False,
    max_errors: o.MaxErrors = None,
    keep: o.Keep = "all",
    flush_every: o.FlushEvery = 5.0,
    grace: o.Grace = 5.0,
    work_dir: o.WorkDir = None,
    stats: o.Stats = None,
    progress: o.ShowProgress = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Generate a completion for every row of INPUT.

    The same command again does nothing when the output is complete, and goes on where it stopped when it is not.
    """
    with reported(verbose=verbose):
        from batchgen.config import JobConfig
        from batchgen.job import run_job
        from batchgen_cli.report import show_report

        config = JobConfig(
            inputs=tuple(inputs),
            output=output,
            input_format=input_format,
            id_column=id_column,
            model=v.model_config(model, revision, dtype, device, trust_remote_code),
            prompts=v.prompt_config(
                prompt_column=prompt_column,
                messages_column=messages_column,
                template=template,
                prefix=prefix,
                chat=chat,
                system=system,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                on_long_prompt=on_long_prompt,
                row_params=row_params,
            ),
            sampling=v.sampling_params(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                stop=tuple(stop or ()),
                stop_token_ids=tuple(stop_token_id or ()),
                ignore_eos=ignore_eos,
                seed=seed,
            ),
            engine=v.engine_config(
                chunk_size=chunk_size,
                batch_size=batch_size,
                max_batch_tokens=max_batch_tokens,
                max_prefill_tokens=max_prefill_tokens,
                kv_memory=kv_memory,
                share=share,
                debug=debug,
            ),
            window=window,
            limit=limit,
            order=order,
            overwrite=overwrite,
            max_errors=max_errors,
            keep=v.kept_columns(keep),
            token_ids=token_ids,
            flush_every=flush_every,
            grace=grace,
            work_dir=work_dir,
            stats=stats,
        )
        with calm_libraries(verbose=verbose), progress_for(progress, quiet=quiet) as shown:
            report = run_job(config, shown)
        if not quiet:
            show_report(report)
        raise typer.Exit(report.exit_code)
