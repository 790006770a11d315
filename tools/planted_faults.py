"""The faults that tools/mutants.py plants into the kernels, and the test of tests/gpu that catches each."""

from typing import NamedTuple

import planted_bwd_faults
from planted_bwd_faults import BACKWARD, BWD, BWD_MASK, FA2_BWD, MODIFIED, PRODUCER, RULE, SAME_BITS, WIDE


class Mutant(NamedTuple):
    name: str
    test: str  # in tests/gpu/, must fail
    file: str  # in csrc/
    old: str  # stands there exactly once
    new: str
    late: bool = False  # with late waits: what a wait guards is usually there in time
    hangs: bool = False  # its kernel waits for ever, which is how the test fails

    @property
    def backend(self) -> str:
        if self.file in (SOFTMAX, EARLY):
            return "fa3"
        if self.file.startswith("fa"):
            return self.file[:3]
        if "mma_bwd" in self.file:
            return "fa2"
        return "fa3" if "bwd" in self.file or "mbarrier" in self.file else "fa2"

    @property
    def is_volta(self) -> bool:
        """Whether it is in fa1's kernels for 7.0, which have a build of their own."""
        return "volta" in self.file

    @property
    def wider(self) -> tuple[str, ...]:
        """Buckets beside 64, for code that runs only there."""
        shared = dict.fromkeys((FWD, KEYS, SHARE, STEP), ("192",))  # where two warps share their rows
        fa3 = {WIDE: ("256",), PRODUCER: ("256",), LOAD3: ("256",), FWD3: ("128", "256")}
        return (shared | fa3 | {BWD: ("128",), FA2_BWD: ("128",)}).get(self.file, ())

    def needs(self, instance: str) -> bool:
        """Whether an instance of the backend's table serves its test: one shows a fault as well as all."""
        kernel, *arguments = instance.partition("(")[2].rstrip(")\n").split(", ")
        if self.backend == "fa1":  # which has one element type, and kernels for 7.0 apart
            other = ("volta" in kernel) != self.is_volta
        else:
            other = arguments.pop(0) != "__nv_bfloat16"
        if other or arguments[0] not in ("64", *self.wider):
            return False
        backward = "bwd" in self.file or self.test in (*BACKWARD, "")
        modified = self.test in (MODIFIED, "")
        return ("bwd" not in kernel or backward) and ("kModified" not in instance or modified)


NEEDLE, MASK = "test_gpu_needle.py::test_every_key_is_found", "test_gpu_needle.py::test_edges_of_the_mask"
NUMBERS = "test_gpu_numbers.py::test_hard_numbers"
GUARDS = "test_gpu_memory.py::test_guard_bands"
ISOLATION = "test_gpu_memory.py::test_a_sequence_never_depends_on_others"
FAR = "test_gpu_memory.py::test_strides_beyond_2_31_elements"
STREAM = "test_gpu_streams.py::test_it_runs_on_the_current_stream"
CHAIN = "test_gpu_streams.py::test_calls_wait_for_those_before"

FWD, TILE, STEP = "fa2/fwd.cuh", "fa2/smem_tile.cuh", "device/warp_rows.cuh"
KEYS, SHARE = "fa2/fwd_load.cuh", "fa2/fwd_share.cuh"
FWD3, LOAD3, EARLY = "fa3/fwd.cuh", "fa3/fwd_load.cuh", "device/early_launch.cuh"
VISIBLE, WORK = "device/visible.cuh", "device/mask.cuh"
SOFTMAX, LAZY, MODIFY = "device/softmax.cuh", "device/lazy_softmax.cuh", "device/modify.cuh"

FWD1, STAGED, LOAD1 = "fa1/fwd.cuh", "fa1/staged_block.cuh", "fa1/bwd_load.cuh"
VOLTA_FWD, VOLTA_MMA, VOLTA_BWD = (f"fa1/volta_{part}.cuh" for part in ("fwd", "mma", "bwd"))
VOLTA_BWD_TILE = "fa1/volta_bwd_tile.cuh"

MUTANTS = [
    Mutant(*row)
    for row in [
        ("no wait for loads", NEEDLE, KEYS, "cp_async_wait<Traits::kStages - 2>();", ""),
        ("no barrier behind loads", NEEDLE, KEYS, "block_barrier();  // everybody's is, and", "//", True),
        (
            "the other's P not waited for",
            NEEDLE,
            KEYS,
            "block_barrier();     // everybody's is there, and nobody reads K",
            "//",
            True,
        ),
        ("P of a warp's own keys twice", NEEDLE, FWD, "p_address(1 - sharer)", "p_address(sharer)"),
        ("V of a warp's own keys twice", NEEDLE, FWD, "v += sharer ? -kWarpKeys : kWarpKeys;", ""),
        ("columns of the other sharer", NEEDLE, FWD, "2 * place.sharer + d %", "2 - 2 * place.sharer + d %"),
        ("maxima of half of the keys", NUMBERS, STEP, "sharers.combine(m, most", "Alone{}.combine(m, most"),
        ("sums of half of the keys", RULE, FWD, "sharers.combine(m, softmax", "Alone{}.combine(m, softmax"),
        ("no barrier between tiles", NEEDLE, FWD, "block_barrier();  // the tile before", "//", True),
        ("causal limit shifted", MASK, VISIBLE, "window_right + 1;", "window_right + 2;"),
        ("window begins late", MASK, VISIBLE, "offset - window_left;", "offset - window_left + 1;"),
        ("ragged last block skipped", NEEDLE, VISIBLE, "(last + kBlockN - 1) / kBlockN", "last / kBlockN"),
        ("last block taken for full", MASK, VISIBLE, ": end / kBlockN", ": (end + kBlockN - 1) / kBlockN"),
        ("first block taken for full", MASK, VISIBLE, "(begin + kBlockN - 1) / kBlockN", "begin / kBlockN"),
        ("one rescale skipped", NUMBERS, SOFTMAX, "o[i] *= rescale", "if (i != 1) o[i] *= rescale"),
        ("sum not rescaled", NUMBERS, LAZY, "sum[half] *= rescale[half];", ""),
        (
            "maximum of half a quad",
            NUMBERS,
            LAZY,
            "__shfl_xor_sync(0xffffffffu, row, Lanes::kNextTwoPairs)",
            "row",
        ),
        ("passing scores overlooked", NUMBERS, LAZY, "signs &= __float", "if (i != 5) signs &= __float"),
        ("scores not brought down", NUMBERS, LAZY, "s[i] -= up, s[i + 1] -= up", "s[i] -= up"),
        ("fa3: sum not rescaled", NUMBERS, SOFTMAX, "sum[half] *= rescale[half];", ""),
        ("fa3: one row's scores overlooked", NUMBERS, SOFTMAX, "most[0] > limit[0] || most", "most"),
        ("fa3: no wait for K", NEEDLE, FWD3, "    wait_k();\n    wait_turn();", "    wait_turn();", True),
        ("fa3: no wait for Q", NEEDLE, FWD3, "  wait_q();\n", ""),
        (
            "fa3: K freed by one warp group alone",
            NEEDLE,
            "fa3/fwd_traits.cuh",
            "init(k_empty[i], kWarps)",
            "init(k_empty[i], 4)",
            True,
            True,
        ),
        ("fa3: a maximum that grew is passed", NUMBERS, FWD3, "rescale[0] != 1.f || rescale", "rescale"),
        ("fa3: quads not transposed", NEEDLE, FWD3, "transpose_quad(r[j]);", ""),
        ("fa3: a row past the end is written", GUARDS, FWD3, "if (i < rows && 32", "if (i <= rows && 32"),
        (
            "fa3: a block too many passed over",
            MASK,
            FWD3,
            "n >= end; --n) pass",
            "n >= end - 1; --n) pass",
            False,
            True,
        ),
        ("fa3: kv head h, not h / group", NEEDLE, LOAD3, "work.head / params.heads_per_kv", "work.head"),
        (
            "fa3: a row past the end is read",
            ISOLATION,
            LOAD3,
            "params.v, batch, work.k_row, length,",
            "params.v, batch, work.k_row, length + 1,",
        ),
        ("fa3: keys of another group's rows", MASK, LOAD3, "+ 64 * group,", "+ 64 * (group ^ 1),"),
        (
            "fa3: keys of a short block left out",
            NEEDLE,
            LOAD3,
            "work.visible.end(end - 1) - (range.max",
            "work.visible.end(end - 1) - 28 - (range.max",
        ),
        ("fa3: no wait for the kernel before", CHAIN, EARLY, 'asm volatile("griddepcontrol.wait;"', "//"),
        ("fa3: launched on the default stream", STREAM, EARLY, "config.stream = stream;", ""),
        ("two V columns swapped", NEEDLE, FWD, "(o[0] * weight, o[1]", "(o[1] * weight, o[0]"),
        ("kv head h, not h / group", NEEDLE, FWD, "work.head / params.heads_per_kv", "work.head"),
        ("a row past the end is read", ISOLATION, TILE, "c < dim && r < end", "c < dim && r <= end"),
        ("a row past the end is written", GUARDS, FWD, "if (i >= work.rows", "if (i > work.rows"),
        ("lse without the reference", NEEDLE, LAZY, "most + logf(total)", "logf(total)"),
        (
            "step skipped at the diagonal",
            MASK,
            STEP,
            "n_begin >= visible.end(last)",
            "n_begin >= visible.end(first)",
        ),
        ("step taken for whole", MASK, STEP, "n_end <= visible.end(first) ?", "n_end <= visible.end(last) ?"),
        (
            "softcap without scale",
            MODIFIED,
            MODIFY,
            "m.scale_by_cap = m.scale / m.cap",
            "m.scale_by_cap = 1 / m.cap",
        ),
        ("tanh without its polynomial", MODIFIED, MODIFY, "kTanhSmall = 0.75f", "kTanhSmall = 0.f"),
        ("alibi of the other sign", MODIFIED, MODIFY, "fmaf(-slope, fabsf", "fmaf(slope, fabsf"),
        ("alibi of half a distance", MODIFIED, MODIFY, "distance + 8 * half", "distance"),
        ("slopes of the first sequence", MODIFIED, MODIFY, "* options.alibi_batch_stride", "* 0"),
        (
            "dropout slot shifted",
            MODIFIED,
            MODIFY,
            "4 * row + pair, m.head",
            "(4 * row + pair ^ 1), m.head",
        ),
        (
            "kept ones not scaled",
            MODIFIED,
            MODIFY,
            "= 1.f / (1.f - options.dropout_threshold / 65536.f)",
            "= 1",
        ),
        ("sink counted twice", RULE, LAZY, "+ expf(sink - most)", "+ 2 * expf(sink - most)"),
        ("packed keys from another row", NEEDLE, WORK, "work.k_row = first;", "work.k_row = first + 1;"),
        ("packed lse at the first row", NEEDLE, WORK, "params.rows_q.total + first", "params.rows_q.total"),
        ("used length ignored", RULE, WORK, "if (params.seqused_k) seqlen_k", "if (false) seqlen_k"),
        ("32-bit row offset", FAR, TILE, "uint64_t{from} * rows.stride", "from * uint32_t(rows.stride)"),
        ("launched on the default stream", STREAM, FWD, "kSmemBytes, stream>>>", "kSmemBytes, 0>>>"),
        ("fa1: no barrier before S", NEEDLE, FWD1, "block_barrier();  // K is there", "//", True),
        ("fa1: no barrier before P V", NEEDLE, FWD1, "block_barrier();  // V is there", "//", True),
        ("fa1: quads of Q not transposed", NEEDLE, FWD1, "transpose_quad(words);\n#pragma", "#pragma"),
        ("fa1: rows of O traded", NEEDLE, FWD1, "transpose_quad(words);\n        const", "const"),
        ("fa1: a block of K too early", NEEDLE, FWD1, "k_rows, n_begin - Traits::kBlockN", "k_rows, n_begin"),
        ("fa1: kv head h, not h / group", NEEDLE, FWD1, "work.head / params.heads_per_kv", "work.head"),
        ("fa1: rows of Q twice", NEEDLE, FWD1, "i = row + 16 * m + 8 * half;", "i = row + 16 * m;"),
        ("fa1: a row past the end is read", ISOLATION, STAGED, "kRowsPerPass < end", "kRowsPerPass <= end"),
        ("fa1: a row past the end is written", GUARDS, FWD1, "if (i >= work.rows", "if (i > work.rows"),
        ("fa1: launched on the default stream", STREAM, FWD1, "kSmemBytes, stream>>>", "kSmemBytes, 0>>>"),
        ("fa1: dO of the block before", RULE, LOAD1, "dout_.store(stage + Traits::kQBytes);", ""),
        ("fa1: delta is lse", RULE, LOAD1, "lse_log2 : params.delta", "lse_log2 : params.lse_log2"),
        ("fa1: loads of no block", RULE, LOAD1, "asked_ = true;", "asked_ = at.head == 0;"),
        ("fa1 7.0: no barrier before S", NEEDLE, VOLTA_FWD, "block_barrier();  // K is there", "//", True),
        (
            "fa1 7.0: a row past the end is written",
            GUARDS,
            VOLTA_FWD,
            "if (i < work.rows &&",
            "if (i <= work.rows &&",
        ),
        (
            "fa1 7.0: P of other keys first",
            NEEDLE,
            VOLTA_MMA,
            "(step % 2 ? other : b)",
            "(step % 2 ? b : other)",
        ),
        ("fa1 7.0: columns of O not traded", NEEDLE, VOLTA_MMA, "second ? got : first_half;", "first_half;"),
        (
            "fa1 7.0: dS not waited for",
            RULE,
            VOLTA_BWD,
            "block_barrier();  // dS is there, and nobody reads Q and dO any more",
            "",
            True,
        ),
        (
            "fa1 7.0: dS of keys that nobody sees stays",
            BWD_MASK,
            VOLTA_BWD,
            "      } else {\n",
            "      } else if (work.keys.rows < 0) {\n",
        ),
        (
            "fa1 7.0: turns in any order",
            SAME_BITS,
            VOLTA_BWD,
            "wait_for_value(turns, turn);",
            "(void)turn;",
        ),
        (
            "fa1 7.0: keys past the end see queries",
            RULE,
            VOLTA_BWD_TILE,
            "j >= keys.seqlen_k ? 1 << 30 :",
            "",
        ),
        *planted_bwd_faults.ROWS,
    ]
]
CONTROLS = [
    Mutant(f"control of {kernels}", "", file, "", "")
    for kernels, file in {"fa1": LOAD1, "fa1 for 7.0": VOLTA_BWD, "fa2": SHARE, "fa3": WIDE}.items()
]
