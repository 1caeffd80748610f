"""Regular expressions and JSON schemas as grammars over a model's vocabulary. Knows llguidance and token bytes, not sequences.

llguidance is the extra `batchgen-llm[structured]`; it is imported with the first grammar.

- `regex` has the syntax of Rust's crate `regex`: no look-around and no back-references. `\\d` matches any Unicode digit (`[0-9]` only
  those of ASCII); `\\w` and `\\s` are Unicode too. The whole text must match; `^` and `$` at its ends change nothing.
- `json_schema` is JSON Schema 2020-12, narrowed by `parsers/json_schemas.py`. Properties come in the schema's order. A keyword that
  cannot be enforced is an error; `oneOf` is enforced as `anyOf`. Outside of strings, the text has at most a space after a colon or a
  comma; with `json_whitespace`, up to 20 spaces or line ends between two JSON tokens. `"x-guidance"` at the top of the schema overrides both.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import RowError, UsageError
from batchgen.parsers.json_schemas import enforceable, loaded
from batchgen.request import Request
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


_MAX_GRAMMARS = 256  # compiled grammars that are kept: each row may bring its own
# Without this option llguidance tokenizes forced text as the tokenizer does: normalized, and with a special token where the text
# contains the name of one.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# White space is bounded, because a weak model may write nothing else. The space after a colon or a comma is the model's choice: most have
# learned JSON with it, and small ones write wrong values (the same age for everybody) where they cannot write it.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SPACED = {"whitespace_pattern": r"[ \n\t]{0,20}"}


_KNOWN: WeakKeyDictionary[Any, dict[int, tuple[list[bytes], LLTokenizer]]] = WeakKeyDictionary()
"""By tokenizer and size, what both vocabularies of a job have, that of its reader and that of its engine. For 262,144 tokens it takes a second."""


@dataclass(frozen=True, eq=False)
class Grammar:
    text: str
    """The grammar in llguidance's syntax; empty if the regex or schema could not be translated."""
    matcher: LLMatcher
    """Stands at the beginning of a text and is never moved. Copies share its lexer with the states found so far and the limits."""
    fault: str
    """Why the grammar cannot be used, in one line; empty if it can."""


class Vocabulary:
    """A model's tokens in llguidance's form, and the grammars compiled for them. Any thread may call its methods.

    `tokenizer` is transformers'; None stands for one whose tokens are the 256 bytes. Only tokens below `size`, the width of the logits,
    count. The token after them, `end`, is ours: llguidance allows it where a text is complete.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.end = size
        self._tokenizer = tokenizer
        self._loaded: tuple[LLTokenizer, LLExecutor] | None = None
        self._texts: list[bytes] = []
        """By token, its bytes, once `_loaded`."""
        self._grammars: OrderedDict[tuple[str | None, str | None, bool], Grammar] = OrderedDict()
        self._lock = Lock()

    def grammar(self, params: SamplingParams) -> Grammar:
        """Returns the grammar of `params`. The grammars used last are kept compiled.

        Raises `UsageError` if llguidance is missing, or if the tokenizer cannot be used (`token_bytes`).
        """
        key = (params.regex, params.json_schema, params.json_whitespace)
        with self._lock:
            grammar = self._grammars.pop(key, None) or self._compile(*key)
            self._grammars[key] = grammar
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def check(self, params: SamplingParams) -> None:
        """Raises `UsageError` if the command's grammar, or any grammar, cannot be used. Costs nothing without a grammar."""
        fault = self._fault(params)
        if fault:
            name, _, rest = fault.partition(" ")
            raise UsageError(f"--{name.replace('_', '-')} {rest}")

    def checked(self, request: Request) -> Request | Result:
        """Returns the request, or the failed result of a row whose grammar cannot be used. Costs nothing without a grammar."""
        fault = self._fault(request.params)
        if fault:
            return Result.from_error(request.row, RowError("constraint_error", fault), len(request.tokens))
        return request

    def _fault(self, params: SamplingParams) -> str:
        return self.grammar(params).fault if params.constrained else ""

    def fresh(self, grammar: Grammar) -> LLMatcher:
        """Returns a matcher with a lexer of its own. Later rows do not get the lexer of `grammar` either."""
        with self._lock:
            self._grammars = OrderedDict((k, g) for k, g in self._grammars.items() if g is not grammar)
            return self._matcher(grammar.text)

    def fill(self, masks: NDArray[np.uint32], matchers: Sequence[tuple[LLMatcher, int]]) -> None:
        """Writes each matcher's mask into its row of `masks` [N, end // 32 + 1]. A matcher that fails allows only `end`; see its `is_error`."""
        if matchers:
            rows, words = masks.shape
            _, executor = self._llguidance()
            executor.unsafe_compute_mask_ptr(list(matchers), masks.ctypes.data, words * masks.itemsize, rows)

    def text(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of tokens."""
        return b"".join(self._texts[token] for token in tokens)

    def spell(self, text: bytes) -> list[int]:
        """Returns tokens of a text as the tokenizer spells it; the longest ones if it changes the text, as many put a space before it."""
        tokens: list[int] = self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False)
        return tokens if max(tokens, default=0) < self.end and self.text(tokens) == text else self._longest(text)

    def forced_behind(self, matcher: LLMatcher, text: bytes) -> bytes | None:
        """Returns what is forced behind a text; None if the text may not come next. The matcher is not moved."""
        matcher = matcher.deep_copy()
        return matcher.compute_ff_bytes() if matcher.consume_tokens(self._longest(text)) else None

    def _longest(self, text: bytes) -> list[int]:
        return self._llguidance()[0].greedy_tokenize(text.decode(errors="ignore"))

    def spelling(self, tokens: Sequence[int], length: int) -> list[int]:
        """Returns the first of `tokens` that have at least `length` bytes together; nothing if all of them have fewer."""
        for count, token in enumerate(tokens, 1):
            length -= len(self._texts[token])
            if length <= 0:
                return list(tokens[:count])
        return []

    def _compile(self, regex: str | None, schema: str | None, spaced: bool) -> Grammar:
        text = ""
        try:
            text = _of_regex(regex) if regex is not None else _of_schema(schema or "", spaced)
            text.encode()  # half of a surrogate pair is no character
            matcher = self._matcher(text)
            first = matcher.deep_copy()
            first.compute_bitmask()
            if matcher.is_error():
                raise ValueError(one_line(matcher.get_error()))
            if first.is_error():
                raise ValueError(f"it allows no text ({one_line(first.get_error())})")
        except UnicodeEncodeError:
            fault = "it is not Unicode"
        except RecursionError:
            fault = "it is nested too deeply"
        except ValueError as e:
            fault = str(e)
        else:
            return Grammar(text, matcher, "")
        name = "json_schema" if regex is None else "regex"
        return Grammar(text, self._matcher(""), f"{name} cannot be used: {fault}")

    def _matcher(self, text: str) -> LLMatcher:
        tokenizer, _ = self._llguidance()
        from llguidance import LLMatcher, LLParserLimits

        # Short errors; the limits are the library's own.
        return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))

    def _llguidance(self) -> tuple[LLTokenizer, LLExecutor]:
        if self._loaded is None:
            try:
                from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

                if find_spec("jsonschema") is None:  # it is imported with the first text
                    raise ImportError
            except ImportError:
                raise UsageError(
                    "a regex or JSON schema needs the packages llguidance and jsonschema",
                    "pip install 'batchgen-llm[structured]'",
                ) from None
            of_bytes = self._tokenizer is None
            known = {} if of_bytes else _KNOWN.setdefault(self._tokenizer, {})
            if self.end not in known:
                texts = [bytes([b]) for b in range(256)] if of_bytes else token_bytes(self._tokenizer, self.end)
                known[self.end] = texts, LLTokenizer(TokenizerWrapper(_Tokens([*texts, b""], self.end)))
            self._texts, tokenizer = known[self.end]
            self._loaded = tokenizer, LLExecutor()
        return self._loaded


@dataclass(frozen=True)
class _Tokens:
    """The attributes that llguidance's `TokenizerWrapper` reads."""

    tokens: list[bytes]
    eos_token_id: int
    bos_token_id: None = None
    special_token_ids: tuple[int, ...] = ()

    def __call__(self, text: bytes) -> list[int]:
        return []  # the tokens of a text; only needed to force tokens


def token_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """Returns the bytes that each id below `size` adds to a text; b"" for special tokens and for ids without a token.

    Raises `UsageError` for a tokenizer whose texts are not the concatenation of its tokens' bytes. (Why not `llguidance.hf`:
    docs/decisions/0011-own-code-beside-a-library.md.)
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    piece = _piece_reader(json.loads(decoder.__getstate__())) if decoder is not None else None
    if backend is None or piece is None:
        raise UsageError(
            f"a regex or JSON schema cannot be enforced with the tokenizer of this model ({type(tokenizer).__name__})",
            "byte-level and sentencepiece tokenizers of the tokenizers library can be used",
        )
    added = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    names = (None if i in special else backend.id_to_token(i) for i in range(size))
    return [b"" if name is None else piece(name) for name in names]


def _piece_reader(decoder: Any) -> Callable[[str], bytes] | None:
    """Returns the function from a token's name to its bytes, given the description of a `tokenizers` decoder; None for decoders that do more."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level if set(kinds) <= {"ByteLevel", "Fuse"} else None
    spaces: list[tuple[str, str]] = []
    for at, step in enumerate(steps):
        if step["type"] == "Replace" and "String" in step["pattern"]:
            spaces.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            spaces.append((step["replacement"], " "))
        elif step["type"] == "Strip":  # strips the beginning of the text, which is in the prompt
            if "Fuse" not in kinds[:at] or step["stop"]:
                return None
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return None

    def piece(name: str) -> bytes:
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
            return bytes([int(name[3:5], 16)])
        for old, new in spaces:
            name = name.replace(old, new)
        return name.encode()

    return piece if spaces or "ByteFallback" in kinds else None


# GPT-2's alphabet: a byte that is a visible character is that character, the others are those from U+0100 in order.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted(set(range(256)) - set(_VISIBLE))
_BYTES = {chr(b): b for b in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}


def _byte_level(name: str) -> bytes:
    if not _BYTES.keys() >= set(name):
        return name.encode()  # an added token stands for itself
    return bytes(_BYTES[c] for c in name)


def _of_regex(regex: str) -> str:
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("it ends inside an escape")
    body = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], regex, flags=re.DOTALL)
    return f"{_OPTIONS}start: /{body}/"


def _of_schema(text: str, spaced: bool) -> str:
    schema = enforceable(loaded(text))
    if isinstance(schema, dict):  # the user's own settings override ours
        settings = schema.get("x-guidance", _SPACED if spaced else _ONE_LINE)
        # The schemas of `oneOf` may overlap. A text that several of them allow is not valid (`json_schemas.is_valid`).
        schema["x-guidance"] = {"coerce_one_of": True} | settings if isinstance(settings, dict) else settings
    grammars = [{"lark_grammar": f"{_OPTIONS}start: @schema"}, {"name": "schema", "json_schema": schema}]
    return json.dumps({"grammars": grammars})


def one_line(message: str) -> str:
    """Returns llguidance's message in one line, without positions in texts that the user did not write."""
    if message.startswith("NoExtensionBias"):
        return "no token may follow"
    parsing = re.search(r"\nerror: (.*)", message)
    line = parsing[1] if parsing else message.strip().split("\n")[0]
    line = re.sub(r'^(at )?\d+\(\d+\): (invalid regex ".*" \(in regex\): )?| at line \d+ column \d+$', "", line)
    if line.startswith("lookarounds not supported"):
        return r"^ and $ can only stand at its ends, and \b nowhere"
    return line
