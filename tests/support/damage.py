"""Damaged files."""

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with a part replaced: cut off, left out, doubled, zeroed or overwritten; or with bits that are flipped."""
    places = st.integers(0, len(content))
    start, end = sorted((draw(places, label="from"), draw(places | st.just(len(content)), label="to")))
    part = content[start:end]
    kinds = ["", "doubled", "zeros", "bytes", *(["flipped"] if part else [])]
    match draw(st.sampled_from(kinds), label="becomes"):
        case "doubled":
            part = part[:1000] * 2 + part[1000:]
        case "zeros":
            part = bytes(min(len(part), 200)) + part[200:]
        case "bytes":
            part = draw(st.binary(min_size=1, max_size=50))
        case "flipped":
            flipped = bytearray(part)
            for bit in draw(st.lists(st.integers(0, 8 * len(part) - 1), min_size=1, max_size=20), label="bits"):
                flipped[bit // 8] ^= 1 << bit % 8
            part = bytes(flipped)
        case _:
            part = b""
    return content[:start] + part + content[end:]
