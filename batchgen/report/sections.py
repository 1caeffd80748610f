"""The body of a report in HTML: headings, key figures, and for every chart its place, a sentence that says what it shows, and its table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from batchgen.recording.agreement import confusion_table
from batchgen.stats import counted, size_text

TABLE_NODES = 30
TABLE_ROWS = 24
TABLE_LABELS = 50
TABLE_CONFUSION = 30
_EXCERPT = 160


def body(data: Mapping[str, Any]) -> str:
    """Returns the body of the page, except its data and its program."""
    sections = [(name, title, content) for name, title, make in _SECTIONS if (content := make(data))]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
    parts = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n{content}\n</section>'
        for name, title, content in sections
    )
    return f"""<a class="skip" href="#content">Skip to the report</a>
<header>
<h1>{escape(data["title"])}</h1>
<p class="lead">{_lead(data)}</p>
{_missing(data)}
{_tiles(data)}
<nav aria-label="Contents"><ul>{links}</ul></nav>
</header>
<main id="content">
<p id="charts-note" role="status" hidden></p>
<noscript><p class="note">The charts need JavaScript. The tables do not.</p></noscript>
{parts}
</main>
<footer><p>Made by batchgen. This page is complete in itself: it loads nothing, and sends nothing.</p></footer>"""


# The top of the page.


def _lead(data: Mapping[str, Any]) -> str:
    stats = data.get("stats")
    if data["kind"] == "plan":
        return "The plan of a run, before anything runs"
    parts = [{"finished": "Finished", "running": "Running"}.get(data["state"], f"Not finished ({data['state']})")]
    if stats:
        device = f" on {stats['device']}" if stats["device"] else ""
        parts.append(f"{escape(Path(stats['model']).name)}, {escape(stats['dtype'])}{escape(device)}")
        runs = stats["job"]["runs"]
        parts += [f"{runs} runs"] if runs > 1 else []
    return " · ".join(parts)


def _missing(data: Mapping[str, Any]) -> str:
    return f'<p class="note">Missing here: {escape(data["missing"])}.</p>' if data["missing"] else ""


def _tiles(data: Mapping[str, Any]) -> str:
    tiles = _plan_tiles(data["plan"]) if data["kind"] == "plan" else _job_tiles(data)
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _job_tiles(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    status, job = data["status"], (data["stats"] or {}).get("job")
    done, total = status["rows_done"] or 0, status["rows_total"]
    tiles = [("rows", f"{done:,}" if done == total or total is None else f"{done:,} of {total:,}")]
    if status["rows_failed"]:
        tiles.append(("failed", f"{status['rows_failed']:,}"))
    if not job:
        return tiles
    if job["prompt_tokens"]:
        tiles.append(("prompt tokens", f"{job['prompt_tokens']:,}"))
        shared = max(0.0, 1 - job["prefill_tokens"] / job["prompt_tokens"])
        tiles.append(("shared, run once", f"{shared:.1%}"))
    if job.get("images"):
        tiles.append(("images", f"{job['images']:,}, {job['images_encoded']:,} encoded"))
    seconds = job["seconds"]
    if job["completion_tokens"]:
        tiles.append(("completion tokens", f"{job['completion_tokens']:,}"))
        speed = (job["completion_tokens"], "completion tokens/s")
    else:
        speed = (job["rows"], "rows/s")
    if seconds["generate"]:
        tiles.append((speed[1], f"{speed[0] / seconds['generate']:,.0f}"))
    tiles.append(("time", exact_duration(seconds["total"])))
    tiles.append(("memory at most", size_text(job["memory_bytes_peak"])))
    return tiles


def _plan_tiles(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    tiles = [
        ("rows", f"{plan['rows']:,}"),
        ("prompt tokens", f"{plan['prompt_tokens']:,}"),
        ("to be run", f"{plan['prefill_tokens']:,}"),
        ("shared, run once", f"{plan['shared_fraction']:.1%}"),
        ("prefix nodes", f"{plan['prefix_nodes']:,}"),
    ]
    if plan["rows_failed"]:
        tiles.insert(1, ("would fail", f"{plan['rows_failed']:,}"))
    if plan["weight_bytes"]:
        tiles.append(("model weights", size_text(plan["weight_bytes"])))
    return tiles


# The content of each section; empty if there is nothing to show.


def _tree(data: Mapping[str, Any]) -> str:
    tree = data["tree"]
    if not tree or not tree["parents"]:
        return ""
    share = tree["saved_tokens"] / max(1, tree["prompt_tokens"])
    says = (
        f"The prefix tree of {counted(tree['rows'], 'prompt')}: {counted(tree['node_count'], 'node')}. Sharing them saves {tree['saved_tokens']:,} of "
        f"{tree['prompt_tokens']:,} prompt tokens ({share:.1%})."
    )
    listed = len(tree["parents"])
    if listed < tree["node_count"]:
        says += f" The {listed:,} nodes with the most rows are drawn; the others are in the cells “more”."
    if data["kind"] == "job" and tree["rows"] + (data["status"]["rows_failed"] or 0) < (
        data["status"]["rows_done"] or 0
    ):
        says += " It is the tree of the run that planned the most rows."
    order = sorted(range(listed), key=lambda i: -tree["saved"][i])[:TABLE_NODES]
    rows = [(tree["node_rows"][i], tree["tokens"][i], tree["saved"][i], _excerpt(tree["texts"][i])) for i in order]
    return f"""<p class="hint">Width: rows. Shade: prompt tokens that sharing the node saves. Choose a node to zoom into it and to read its text, with the mouse here or with the buttons below.</p>
{_chart("tree-chart", says, _table("The nodes that save the most", ("rows", "own tokens", "saved tokens", "start of the text"), rows), tall=True)}
<div id="node" class="panel" hidden>
<h3>The chosen node</h3>
<nav aria-label="Path to the node"><ol id="node-path"></ol></nav>
<p id="node-says" role="status"></p>
<pre id="node-text" tabindex="0" aria-label="Text of the node"></pre>
<h4 id="below-title">Below it</h4>
<ul id="node-children" aria-labelledby="below-title"></ul>
</div>"""


def _speed(data: Mapping[str, Any]) -> str:
    runs = [run for run in data.get("runs", ()) if len(run["seconds"]) > 1]
    if not runs:
        return ""
    rows = [
        (_run_name(runs, i), f"{run['seconds'][k + 1]:,.1f}", *(f"{run[name][k]:,.0f}" for name in _RATES))
        for i, run in enumerate(runs)
        for k in _spread(len(run["seconds"]) - 1, max(2, TABLE_ROWS // len(runs)))
    ]
    fastest = {name: max(max(run[rate]) for run in runs) for name, rate in zip(_RATE_NAMES, _RATES, strict=True)}
    listed = ", ".join(f"{value:,.0f} {name}" for name, value in fastest.items() if value)
    says = (
        f"Tokens per second over {exact_duration(sum(run['seconds'][-1] for run in runs))}; at most {listed or 'none'}."
    )
    head = ("run", "seconds", *_RATE_NAMES)
    return _chart("speed-chart", says, _table("Tokens per second", head, rows))


_RATE_NAMES = ("completion tokens/s", "prompt tokens/s", "scored tokens/s")
_RATES = ("completion_tokens_per_s", "prefill_tokens_per_s", "scored_tokens_per_s")


def _time(data: Mapping[str, Any]) -> str:
    bars = data.get("time")
    if not bars:
        return ""
    total = data["stats"]["job"]["seconds"]["total"]
    largest = max(bars, key=lambda bar: bar[1])
    says = (
        f"All runs took {exact_duration(total)}; the longest part was “{largest[0]}” with {exact_duration(largest[1])}. "
        "Reading and planning go on beside the other parts."
    )
    rows = [(name, f"{seconds:,.2f}") for name, seconds in bars]
    table = _table("Where the time went", ("part", "seconds"), [*rows, ("in all", f"{total:,.2f}")])
    return _chart("time-chart", says, table)


def _lengths(data: Mapping[str, Any]) -> str:
    rows = data.get("rows") or {}
    charts = []
    for name, what in (("prompt_tokens", "prompts"), ("completion_tokens", "completions")):
        found = rows.get(name)
        if found:
            says = (
                f"Tokens of {found['count']:,} {what}: from {found['min']:,} to {found['max']:,}, "
                f"half of them at most {found['p50']:,}, 99% at most {found['p99']:,}."
            )
            charts.append(_chart(f"{name}-chart", says, _bins(f"Lengths of {what}, in tokens", found, whole=True)))
    return f'<div class="pair">{"".join(charts)}</div>' if charts else ""


def _ends(data: Mapping[str, Any]) -> str:
    rows = data.get("rows")
    if not rows or not rows["rows"]:
        return ""
    ends = [(reason, count) for reason, count in rows["reasons"].items() if reason != "error"]
    ends += [(f"error: {kind}", count) for kind, count in rows["errors"].items()]
    listed = ", ".join(f"{count:,} {reason}" for reason, count in ends)
    table = _table("How rows ended", ("reason", "rows", "part"), [(r, n, f"{n / rows['rows']:.2%}") for r, n in ends])
    shown = rows.get("thumbnails") or {}
    samples = "".join(_samples(kind, rows["samples"].get(kind, ()), shown.get(kind, ())) for kind, _ in ends)
    return _chart("ends-chart", f"{listed}.", table) + f"<h3>Sample rows</h3>{samples}"


def _image(number: int, url: str) -> str:
    return f'<img alt="image {number} of the row" src="{escape(url)}">'


def _samples(kind: str, samples: Sequence[Mapping[str, Any]], thumbnails: Sequence[Sequence[str]]) -> str:
    """`thumbnails`: the URLs of those of each sample's images."""
    rows = "".join(
        f"<li>{''.join(_image(i, url) for i, url in enumerate(shown, 1))}"
        f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{_value(value)}</dd>' for name, value in row.items())}</dl></li>"
        for row, shown in zip(samples, [*thumbnails, *[()] * len(samples)], strict=False)
    )
    return (
        f"<details><summary>{escape(kind)}: the first {len(samples)}</summary><ol class='samples'>{rows}</ol></details>"
    )


def _labels(data: Mapping[str, Any]) -> str:
    found = data.get("rows") or {}
    labels = found.get("labels")
    if not labels:
        return ""
    rows = [
        (
            label["label"],
            label["rows"],
            f"{label['mean_probability']:.3f}",
            "" if label["mean_probability_chosen"] is None else f"{label['mean_probability_chosen']:.3f}",
        )
        for label in labels
    ]
    says = f"{counted(len(labels), 'label')}; the most frequent is “{labels[0]['label']}” with {counted(labels[0]['rows'], 'row')}."
    if found["other_labels"]:
        says += f" {counted(found['other_labels'], 'row')} {'has another label' if found['other_labels'] == 1 else 'have other labels'}."
    head = ("label", "rows", "mean probability", "where it was chosen")
    return _chart("labels-chart", says, _table("Labels", head, rows[:TABLE_LABELS]))


def _expected(data: Mapping[str, Any]) -> str:
    found = (data.get("stats") or {}).get("expect")
    if not found or not found["rows"]:
        return ""
    says = f"{found['rows_right']:,} of {counted(found['rows'], 'row')} are as in the column “{escape(found['column'])}” ({found['accuracy']:.1%})."
    if confusion := confusion_table(found, TABLE_CONFUSION):
        tables = _table("Expected and given labels", confusion[0], confusion[1:])
    else:
        pairs = [(pair["expected"], pair["given"], pair["rows"]) for pair in found["confusion"][:TABLE_ROWS]]
        tables = _table("Expected and given, the most frequent first", ("expected", "given", "rows"), pairs)
    calibration = found["calibration"]
    if calibration is not None:
        says += (
            f" The labels that were given have a mean probability of {calibration['mean_probability']:.1%}; "
            f"the expected calibration error is {calibration['error']:.1%}."
        )
        bins = [
            (f"{b['from']:.1f} to {b['to']:.1f}", b["rows"], f"{b['mean_probability']:.1%}", f"{b['accuracy']:.1%}")
            for b in calibration["bins"]
            if b["rows"]
        ]
        head = ("probability", "rows", "mean probability", "right")
        tables += _table("How often labels are right, by their probability", head, bins)
    return f"<p>{says}</p>{tables}"


def _scores(data: Mapping[str, Any]) -> str:
    rows = data.get("rows") or {}
    charts = ""
    if found := rows.get("scores"):
        says = (
            f"Mean log-probability of a token in {found['count']:,} scored completions: half of them are at most {found['p50']:,}; "
            f"greedy decoding would have written {rows['scores_greedy']:,} of them."
        )
        charts += _chart("scores-chart", says, _bins("Mean log-probability of a token", found))
    if found := rows.get("rewards"):
        says = f"Rewards of {counted(found['count'], 'row')}: from {found['min']:,} to {found['max']:,}, half of them at most {found['p50']:,}."
        charts += _chart("rewards-chart", says, _bins("Rewards", found))
    return charts


def _memory(data: Mapping[str, Any]) -> str:
    if data["kind"] == "plan":
        bars = data["memory"]
        says = "; ".join(f"{name}: {size_text(count)}" for name, count in bars) + "."
        table = _table("Memory", ("what", "size"), [(name, size_text(count)) for name, count in bars])
        return _chart("memory-chart", says, table) if bars else ""
    runs = [run for run in data["runs"] if len(run["seconds"]) > 1]
    if not runs or not data["stats"]:
        return ""
    job = data["stats"]["job"]
    says = f"At most {size_text(job['memory_bytes_peak'])} in all."
    kv = (
        f"At most {size_text(job['kv_bytes_peak'])} of keys and values in use. Without sharing, the last run's rows would have needed "
        f"{size_text(data['stats']['kv_bytes_unshared'])}."
    )
    rows = [
        (
            _run_name(runs, i),
            f"{run['seconds'][k]:,.1f}",
            size_text(run["memory_bytes"][k]),
            size_text(run["kv_bytes"][k]),
        )
        for i, run in enumerate(runs)
        for k in _spread(len(run["seconds"]), max(2, TABLE_ROWS // len(runs)))
    ]
    table = _table("Memory", ("run", "seconds", "memory", "keys and values in use"), rows)
    return f'<div class="pair">{_chart("memory-chart", says)}{_chart("kv-chart", kv)}</div>{_behind(table)}'


def _shards(data: Mapping[str, Any]) -> str:
    """The shards of a job, planned or under way."""
    if data["kind"] == "plan":
        cuts = data["plan"]["shards"]
        if not cuts:
            return ""
        shares = enumerate(zip(cuts["rows"], cuts["cost"], strict=True), 1)
        planned = [(number, rows, f"{part:.1%}") for number, (rows, part) in shares]
        again = f"<p>{cuts['prefill_tokens_again']:,} prompt tokens would be run by two shards.</p>"
        return again + _table("Shards", ("shard", "rows", "part of the work"), planned)
    shards = data["status"]["shards"]
    if not shards:
        return ""
    rows = [(s["shard"], s["state"], s["host"] or "", s["rows_done"] or 0, s["rows_total"]) for s in shards]
    return _table("Shards", ("shard", "state", "host", "rows done", "rows"), rows)


def _figures(data: Mapping[str, Any]) -> str:
    found = data["plan"] if data["kind"] == "plan" else data["stats"]
    if not found:
        return ""
    text = escape(json.dumps(found, indent=1, ensure_ascii=False))
    what = "plan --json" if data["kind"] == "plan" else "stats.json"
    return f'<details><summary>{what}</summary><pre tabindex="0" aria-label="{what}">{text}</pre></details>'


_SECTIONS = (
    ("tree", "Prefix tree", _tree),
    ("speed", "Tokens per second", _speed),
    ("time", "Where the time went", _time),
    ("lengths", "Lengths of prompts and completions", _lengths),
    ("ends", "How rows ended", _ends),
    ("labels", "Labels", _labels),
    ("expected", "Right and wrong", _expected),
    ("scores", "Scores and rewards", _scores),
    ("memory", "Memory", _memory),
    ("shards", "Shards", _shards),
    ("figures", "All figures", _figures),
)
"""Id, title and content of each. One without content is left out."""


# Parts of sections.


def _chart(name: str, says: str, table: str = "", *, tall: bool = False) -> str:
    """The place of a chart with the sentence that says what it shows (plain text), and its table (HTML)."""
    size = " tall" if tall else ""
    return (
        f'<figure><div id="{name}" class="chart{size}" role="img" aria-label="{escape(says)}"></div>'
        f"<figcaption>{escape(says)}</figcaption>{_behind(table)}</figure>\n"
    )


def _behind(table: str) -> str:
    """A table that shows on demand."""
    return f"<details><summary>As a table</summary>{table}</details>" if table else ""


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    numeric = text[:1].isdigit() or text[:1] == "-"
    return f"<td{' class=n' if numeric else ''}>{escape(text)}</td>"


def _bins(caption: str, found: Mapping[str, Any], *, whole: bool = False) -> str:
    """A histogram as a table. Bins of whole numbers end before their second number, except a last one that holds the long tail."""
    ends = [high - 1 if whole else high for _, high, _ in found["bins"]]
    if found["bins"][-1][1] == found["max"]:
        ends[-1] = found["max"]
    rows = [(f"{low:,}", f"{end:,}", count) for (low, _, count), end in zip(found["bins"], ends, strict=True)]
    return _table(caption, ("from", "to", "rows"), rows)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text)


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else f"{line[:_EXCERPT]}…"


def _run_name(runs: Sequence[Mapping[str, Any]], i: int) -> str:
    return f"shard {runs[i]['label']}" if runs[i]["label"] else f"run {i + 1}"


def _spread(count: int, wanted: int) -> list[int]:
    """Returns `wanted` places among `count`, at equal distances, the last one among them."""
    return sorted({count - 1 - i * count // wanted for i in range(wanted)} & set(range(count)))


def exact_duration(seconds: float) -> str:
    """Returns a time as text: 3.2 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
