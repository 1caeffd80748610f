"""The kernels are compiled for the processor's instructions, or for fewer where `BATCHGEN_ISA` says so."""

import pytest

from batchgen.errors import UsageError
from batchgen.kernels import isa
from batchgen.kernels.isa import ARM, X86, allowed

HASWELL = frozenset(["fpu", "sse2", "avx", "avx2", "fma", "f16c", "bmi2"])
SKYLAKE_X = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
ZEN4 = SKYLAKE_X | {"avx512_bf16", "avx512_vnni"}
SAPPHIRE_RAPIDS = ZEN4 | {"GenuineIntel", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "avx512_fp16"}
GRAVITON2 = frozenset(["fp", "asimd", "asimddp"])
GRAVITON3 = GRAVITON2 | {"bf16", "i8mm", "asimdhp"}


@pytest.fixture
def on(monkeypatch):
    """Pretends that this processor is another one."""

    def pretend(machine, features, wish=None):
        monkeypatch.setattr(isa.platform, "machine", lambda: machine)
        monkeypatch.setattr(isa, "features", lambda: features)
        if wish is None:
            monkeypatch.delenv("BATCHGEN_ISA", raising=False)
        else:
            monkeypatch.setenv("BATCHGEN_ISA", wish)
        isa.instruction_set.cache_clear()

    yield pretend
    monkeypatch.undo()
    isa.instruction_set.cache_clear()


@pytest.mark.parametrize(
    ("sets", "has", "found", "wish"),
    [
        (X86, frozenset({"sse2", "avx"}), "none", None),
        (X86, HASWELL, "avx2", None),
        (X86, SKYLAKE_X, "avx512", None),
        (X86, SKYLAKE_X - {"avx512vl"}, "avx2", None),
        (X86, HASWELL | {"avx_vnni"}, "avx2_vnni", None),
        (X86, SKYLAKE_X | {"avx512_vnni"}, "avx512_vnni", None),
        (X86, ZEN4, "avx512_bf16", None),
        (X86, SAPPHIRE_RAPIDS, "amx", None),
        (ARM, GRAVITON2 - {"asimddp"}, "neon", None),
        (ARM, GRAVITON2, "neon_dot", None),
        (ARM, GRAVITON3, "neon_bf16", None),
        (("none",), SAPPHIRE_RAPIDS, "none", None),
        (X86, HASWELL, "avx2", "avx512"),
        (X86, ZEN4, "avx512_bf16", "neon"),
        (X86, ZEN4, "avx2", "avx2_vnni"),
    ],
)
def test_the_largest_set_that_the_processor_has_and_no_larger_one_than_is_wished_is_used(sets, has, found, wish):
    assert allowed(wish, sets, has) == found


def test_an_unknown_set_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(UsageError) as refused:
        allowed("avx3", ARM, GRAVITON2)
    assert (
        str(refused.value)
        == "BATCHGEN_ISA 'avx3' is unknown; use one of none, neon, neon_dot, neon_bf16, or leave it out"
    )


def test_the_compiler_gets_exactly_the_instructions_of_the_set(on):
    on("x86_64", SAPPHIRE_RAPIDS, "avx2")
    assert isa.flags() == ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
    on("x86_64", SAPPHIRE_RAPIDS, "avx2_vnni")
    assert isa.flags() == ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavxvnni"]
    on("x86_64", SAPPHIRE_RAPIDS, "avx512_bf16")
    assert isa.flags()[-3:] == ["-mavx512vnni", "-mavx512bf16", "-DBATCHGEN_WIDENS"]
    assert "-mavxvnni" not in isa.flags()
    on("x86_64", SAPPHIRE_RAPIDS)
    assert isa.flags()[-2:] == ["-mavx512bf16", "-DBATCHGEN_AMX"]
    on("x86_64", ZEN4)
    assert isa.flags()[-2:] == ["-mavx512vnni", "-mavx512bf16"]
    on("x86_64", SAPPHIRE_RAPIDS, "none")
    assert isa.flags() == []
    on("aarch64", GRAVITON3)
    assert isa.flags() == ["-march=armv8.2-a+simd+dotprod+bf16"]


def test_16_bit_products_are_fast_only_with_instructions_for_them(on):
    for machine, features, wish, bfloat16, float16 in [
        ("x86_64", HASWELL, None, False, False),
        ("x86_64", SKYLAKE_X, None, False, False),
        ("x86_64", ZEN4, None, True, False),
        ("x86_64", SAPPHIRE_RAPIDS, None, True, True),
        ("x86_64", SAPPHIRE_RAPIDS, "avx2", False, False),
        ("x86_64", SAPPHIRE_RAPIDS, "none", True, True),  # plain torch uses all of the processor's instructions
        ("aarch64", GRAVITON2, None, False, False),
        ("aarch64", GRAVITON3, None, True, True),
        ("riscv64", frozenset(), None, False, False),
    ]:
        on(machine, features, wish)
        assert (isa.has_bfloat16(), isa.has_float16()) == (bfloat16, float16)


def test_matrix_units_that_the_system_denies_this_process_are_not_used(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags\t\t: avx2 amx_tile amx_bf16\n")
    monkeypatch.setattr(isa, "Path", lambda _: tmp_path / "cpuinfo")
    for may, has in (True, {"avx2", "amx_tile", "amx_bf16"}), (False, {"avx2", "amx_bf16"}):
        monkeypatch.setattr(isa, "_may_use_tiles", lambda may=may: may)
        isa.features.cache_clear()
        assert isa.features() == has
    isa.features.cache_clear()
