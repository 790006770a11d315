"""The faults of the backward's kernels among those of tools/planted_faults.py: rows of its Mutant."""

RULE, MODIFIED = "test_gpu_rule.py::test_problem", "test_gpu_rule.py::test_modified_scores"
BWD_MASK = "test_gpu_needle.py::test_edges_of_the_mask_backward"
BWD_GUARDS = "test_gpu_memory.py::test_guard_bands_backward"
BWD_ISOLATION = "test_gpu_memory.py::test_gradients_never_depend_on_other_sequences"
SAME_BITS = "test_gpu_streams.py::test_deterministic_gradients"
BACKWARD = BWD_MASK, BWD_GUARDS, BWD_ISOLATION, SAME_BITS

FA2_BWD, FA2_LOAD = "device/mma_bwd.cuh", "fa2/bwd_load.cuh"
FA2_WORK, FA2_MODIFY, FA2_OUT = (f"device/mma_bwd_{part}.cuh" for part in ("work", "modify", "output"))
BWD, WIDE, PRODUCER, ROW_KERNELS = (
    "fa3/bwd.cuh",
    "fa3/bwd_wide.cuh",
    "fa3/bwd_producer.cuh",
    "device/bwd_rows.cuh",
)
TRAITS, BWD_MODIFY = "fa3/bwd_traits.cuh", "device/bwd_modify.cuh"

ROWS = [
    (
        "dS not waited for",
        RULE,
        BWD,
        "mbarrier_wait(smem_address(&barriers.ds_full[of % Traits::kStages]), of / Traits::kStages % 2);",
        "",
        True,
    ),
    (
        "dS overwritten",
        RULE,
        BWD,
        "mbarrier_wait(smem_address(&barriers.ds_empty[stage()]), phase() ^ 1);",
        "",
        True,
    ),
    (
        "keys that nobody sees not waited for",
        RULE,
        BWD,
        "mbarrier_wait(smem_address(&barriers.k_full), tiles % 2);\n  mbarrier_wait(",
        "if (work.range.min >= work.range.max) return void(++tiles);\n"
        "  mbarrier_wait(smem_address(&barriers.k_full), tiles % 2);\n  mbarrier_wait(",
        True,
        True,
    ),
    ("wide: P not waited for", RULE, WIDE, "sync_all();  // P of all keys", "//", True),
    ("wide: dS not waited for", RULE, WIDE, "sync_all();  // dS of all keys", "//", True),
    ("wide: staged dQ overwritten", RULE, WIDE, "if (lane == 0) tma_store_wait_read();", ""),
    (
        "wide: the rest of dQ is not added",
        RULE,
        WIDE,
        "    red_add_floats(",
        "    if (slab < 0) red_add_floats(",
    ),
    (
        "wide: no rest of the last block",
        RULE,
        WIDE,
        "work.range.min, params.heads_per_kv - 1, b",
        "work.range.min, 0, b",
    ),
    (
        "wide: turns in any order",
        SAME_BITS,
        PRODUCER,
        "wait_for_turn(params.turns + Traits::kSlabs * slot + slab, blocks_before<Traits>(work, m));",
        "",
    ),
    (
        "wide: a turn ends before its addition",
        SAME_BITS,
        PRODUCER,
        "        mbarrier_wait(smem_address(&barriers.turn_over[slab]), blocks % 2);\n",
        "        pass_turn(params.turns + Traits::kSlabs * slot + slab);\n"
        "        mbarrier_wait(smem_address(&barriers.turn_over[slab]), blocks % 2);\n",
        True,
    ),
    (
        "nobody waits for a turn",
        SAME_BITS,
        "device/mbarrier.cuh",
        "while (now < turn)",
        "while (false)",
        True,
    ),
    ("turns in any order", SAME_BITS, PRODUCER, "params.deterministic ? before : 1", "1"),
    ("first block of keys adds", BWD_GUARDS, PRODUCER, ": bulk_store(", ": bulk_add("),
    ("mask not mirrored", BWD_MASK, PRODUCER, "params.window_right, params.window_left}", "0, 0}"),
    ("delta left out", RULE, BWD, "dp[4 * j + i] - (i % 2 ? delta.y : delta.x)", "dp[4 * j + i]"),
    ("dK from P", RULE, BWD, "issue_gradient(dk, ds_rounded, q)", "issue_gradient(dk, p_rounded, q)"),
    ("dK not scaled", RULE, BWD, "dk,\n                     params.softmax_scale);", "dk, 1.f);"),
    ("dropped P in dV", MODIFIED, BWD, "if constexpr (Traits::kModified) drop(s, kept);", ""),
    ("dV of kept ones not scaled", MODIFIED, TRAITS, "modified ? work.modifier.kept_scale : 1.f", "1.f"),
    (
        "slope of the group's first head",
        MODIFIED,
        TRAITS,
        "params.heads_per_kv + member;\n  return",
        "params.heads_per_kv;\n  return",
    ),
    ("dropout of the group's first head", MODIFIED, TRAITS, "modifier.head += member;", ""),
    (
        "softcap's derivative left out",
        MODIFIED,
        BWD_MODIFY,
        "dp[i] *= cap_derivative(s[i], inverse_cap);",
        "dp[i] *= 1.f;",
    ),
    ("dP of dropped ones", MODIFIED, BWD_MODIFY, "drop ? 0.f : dp[i] * kept_scale", "dp[i] * kept_scale"),
    (
        "alibi's distance not negated",
        MODIFIED,
        BWD_MODIFY,
        "row - column - distance",
        "row - column + distance",
    ),
    ("dropout of the queries before", MODIFIED, BWD_MODIFY, "kTransposed ? 16 * block : 0", "0"),
    ("wide: dropped P in dV", MODIFIED, WIDE, "    drop(s, kept);\n", ""),
    ("d_lse ignored", RULE, ROW_KERNELS, "delta -= params.d_lse[lse_row + row]", "delta -= 0.f"),
    ("last sequence left out of d_sink", RULE, ROW_KERNELS, "i < count;", "i + slots < count;"),
    ("dQ of a spare row is not 0", BWD_GUARDS, ROW_KERNELS, "row < used ? make", "row < tile.rows ? make"),
    ("fa2: dS not waited for", RULE, FA2_BWD, "block_barrier();  // dS and the next", "//", True),
    (
        "fa2: others' P not waited for",
        RULE,
        FA2_BWD,
        "named_barrier_sync(1 + key_warp, ",
        "(void)(",
        True,
    ),
    (
        "fa2: turns in any order",
        SAME_BITS,
        FA2_BWD,
        "wait_for_value(params.dq_turns + q_tile, turn);",
        "",
    ),
    ("fa2: dK not scaled", RULE, FA2_BWD, "(smem, dk, params.softmax_scale,", "(smem, dk, 1.f,"),
    ("fa2: mask of S^T shifted", BWD_MASK, "device/mma_bwd_tile.cuh", "8 * r >= end", "8 * r > end"),
    (
        "fa2: Q of a spare row is read",
        BWD_ISOLATION,
        FA2_LOAD,
        "row + r < row_end",
        "row + r <= row_end",
    ),
    (
        "fa2: one head of a group",
        RULE,
        FA2_LOAD,
        "params.heads_per_kv + at.head;",
        "params.heads_per_kv;",
    ),
    ("fa2: ragged last queries skipped", RULE, FA2_WORK, "(i_end + Traits::kBlockM - 1)", "i_end"),
    (
        "fa2: dropped P in dV",
        MODIFIED,
        FA2_BWD,
        "bits & 1 ? p[m][i] : 0.f, bits & 2 ? p[m][i + 1] : 0.f",
        "p[m][i], p[m][i + 1]",
    ),
    ("fa2: dV of kept ones not scaled", MODIFIED, FA2_BWD, "modifiers[0].kept_scale : 1.f", "1.f : 1.f"),
    (
        "fa2: the other head's modifier",
        MODIFIED,
        FA2_BWD,
        "modifiers[at.head % 2], work",
        "modifiers[0], work",
    ),
    (
        "fa2: softcap's derivative left out",
        MODIFIED,
        FA2_MODIFY,
        " * cap_derivative(s[m][i], inverse_cap)",
        "",
    ),
    (
        "fa2: dP of dropped ones",
        MODIFIED,
        FA2_MODIFY,
        "drop ? 0.f : dp[m][i] * modifier.kept_scale",
        "dp[m][i] * modifier.kept_scale",
    ),
    ("fa2: dropout of the keys before", MODIFIED, FA2_MODIFY, "8 * n, key + 16 * m)", "8 * n, key)"),
    (
        "fa2: alibi's distance not negated",
        MODIFIED,
        FA2_MODIFY,
        "key + 16 * m + lane / 4 - query - 2 * (lane % 4) - offset",
        "query + 2 * (lane % 4) + offset - key - 16 * m - lane / 4",
    ),
    ("fa2: delta of other queries", MODIFIED, FA2_MODIFY, "delta + 32 * n", "delta"),
    ("fa2: dK past the end is written", BWD_GUARDS, FA2_OUT, "j >= length", "j > length"),
]
