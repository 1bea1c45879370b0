"""What the lab's recorded runs say: the pages' tables, their cost, and what is claimed."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean, stdev

import pytest
import torch

from benchmarks import lab_page
from benchmarks.lab import launch, publish, tuning
from benchmarks.lab.contenders import CONTENDERS, HEADLINE
from benchmarks.lab.records import TUNED_AT, Records, reported
from benchmarks.lab.report import Difference, View, difference, sent
from benchmarks.lab.run import diverged, run
from benchmarks.lab.tasks import FIRST, QUICK, TASKS
from benchmarks.netlab.whole import renewals
from benchmarks.pages import DOCS, ROOT, TABLES, tables_in
from benchmarks.shapes import bert_large, sizes
from fusedonebit import ZeroOneAdam
from fusedonebit.comm import Messages
from fusedonebit.comm.shared_squares import Rows
from fusedonebit.triton_kernels import FlatLayout, choose_block_size
from fusedonebit.triton_kernels.projections import Projections
from fusedonebit.triton_kernels.renewal import SUMS

RECORDS = Records(lab_page.RESULTS / "runs.jsonl")
SEEDS = {4: 5, 16: 5}
"""Paired seeds that are recorded, by the number of workers."""

SECONDS, HOURS = 30.0, 4.0
BERT = FlatLayout(tuple(sizes(bert_large())), 64, choose_block_size(sizes(bert_large()), 64))


@pytest.mark.parametrize("workers", SEEDS)
def test_every_task_and_optimizer_of_the_headline_has_its_seeds(workers):
    for task, optimizer in product(FIRST, HEADLINE):
        assert len(View(workers).runs(RECORDS, task, optimizer)) >= SEEDS[workers], (task, optimizer)


@pytest.mark.parametrize("optimizer", lab_page.VOTES)
def test_every_task_has_its_seeds_of_what_votes_with_4_workers(optimizer):
    for task in FIRST:
        assert len(View().runs(RECORDS, task, optimizer)) >= SEEDS[4], (task, optimizer)


def test_every_rate_is_the_best_of_a_search_and_not_at_its_edge():
    for task, optimizer in product(FIRST, (*HEADLINE, *lab_page.VOTES)):
        tried, best = RECORDS.metrics(task, optimizer), RECORDS.tuned(task, optimizer)
        if (task, optimizer) == ("modadd", "onebit-lion"):
            assert set(tried.values()) == {math.inf}, "there it learns at no rate, and runs at the smallest"
            continue
        assert best is not None
        assert min(tried) < best < max(tried), (task, optimizer, tried)


def test_the_headline_takes_at_most_four_core_hours():
    """Of processor time, search included; and none of its runs half a minute."""
    cells = list(product(FIRST, HEADLINE))
    keys = [k for k in RECORDS.found if k.optimizer in HEADLINE and k.seed in tuning.SEEDS]
    keys += reported(RECORDS, cells, max(SEEDS.values()), list(SEEDS), [1.0], parents=False)
    seconds = {key: RECORDS.found[key]["seconds"] for key in keys}
    hours = sum(seconds.values()) / 3600
    print(f"{len(seconds)} runs, search included: {hours:.2f} core-hours (at most {HOURS:g})")
    for workers in SEEDS:
        longest = max((k for k in keys if k.workers == workers), key=seconds.__getitem__)
        print(f"longest: {seconds[longest]:.1f} s (at most {SECONDS:g}), {longest}")
        assert seconds[longest] <= SECONDS
    assert hours <= HOURS


@pytest.mark.parametrize("workers", SEEDS)
def test_the_lab_tells_what_a_frozen_variance_costs(workers):
    found = {task: difference(RECORDS, View(workers), task, "onebit-adam") for task in FIRST}
    missed = [task for task, d in found.items() if d is not None and d.misses]
    certain = [task for task in missed if found[task].certain]
    print(f"OneBitAdam, {workers} workers: misses {len(missed)} of {len(found)} (at least 6): {missed}")
    print(f"of those beyond two standard errors: {len(certain)}: {certain}")
    assert len(missed) >= 6


CLAIMS = [
    # A living variance, of which few tasks tell 1 %; one task is aimed at.
    ("onebit-adam-living", View(4, parents=True), 1.0, 0.05, 10, {"gan", "modadd"}),
    ("onebit-adam-living", View(16, parents=True), 1.0, 0.05, 10, 4),
    # At twice the rate none is aimed at; on one of these tasks a seed diverges.
    ("onebit-adam-living", View(4, parents=True, by=2.0), 5.0, 0.25, 10, {"gan", "fit", "policy"}),
    # After one step of warm-up; 3 are aimed at.
    ("onebit-adam-living-0", View(4, parents=True), 3.0, 0.15, 3, 5),
    # Moments in fewer bits; 2 are aimed at. On the GAN and on vgg seeds differ by four times the limit.
    ("adamw-bf16", View(4, parents=True), 0.5, 0.05, 5, 3),
    ("adamw-8bit", View(4, parents=True), 0.5, 0.05, 5, 2),
    # At their own rates; 2 are aimed at.
    *[("onebit-lamb-living", View(w), 3.0, 0.15, 5, 2) for w in SEEDS],
    *[("zero-one-adam-own", View(w), 3.0, 0.15, 5, most) for w, most in ((4, 2), (16, 3))],
    ("zero-one-adam-shared", View(4, parents=True), 3.0, 0.15, 5, {"gan", "modadd"}),
]
"""Optimizer, view, percent or decades above which it is worse than its parent, least paired seeds; and on how many
tasks it may be worse, or on which: as recorded."""


@pytest.mark.parametrize(("optimizer", "view", "percent", "decades", "seeds", "allowed"), CLAIMS)
def test_no_more_tasks_are_worse_than_recorded(optimizer, view, percent, decades, seeds, allowed):
    found = {task: difference(RECORDS, view, task, optimizer) for task in FIRST}
    assert all(d is not None and d.seeds >= seeds for d in found.values())
    print(f"{optimizer}, {view.title}: { {task: str(d) for task, d in found.items()} }")
    worse = {task for task, d in found.items() if beyond(d, percent, decades)}
    print(f"{len(worse)} of {len(found)} beyond {percent:g} % or {decades:g} dec: {sorted(worse)}")
    if isinstance(allowed, int):
        assert not any(d.diverged for d in found.values())
        assert len(worse) <= allowed
    else:
        assert worse <= allowed


NARROW = {"onebit-adam-state-bf16": (2, 0), "onebit-adam-state-8bit": (5, 2)}
"""Tasks on which state in fewer bits is worse than in float32 by more than 0.5 %, or 0.05 dec: as many as are recorded;
and those of which that is more than two standard errors."""


def paired(view: View, task: str, ours: str, theirs: str) -> tuple[float, float]:
    """By how much one optimizer is worse than another, in percent or decades, over common seeds; its standard error."""
    mine, others = (view.runs(RECORDS, task, name) for name in (ours, theirs))
    seeds = sorted(mine.keys() & others.keys())
    assert len(seeds) >= 10
    ratios = torch.tensor([mine[s]["metric"] / others[s]["metric"] for s in seeds], dtype=torch.float64)
    each = ratios.log10() if TASKS[task].noiseless else 100 * (ratios - 1)
    return float(each.mean()), float(each.std() / len(each) ** 0.5)


@pytest.mark.parametrize("name", NARROW)
def test_residuals_in_fewer_bits_cost_little_beside_seeds(name):
    worse, plain = [], []
    for task in FIRST:
        mean, error = paired(View(4, parents=True), task, name, "onebit-adam-living")
        limit = 0.05 if TASKS[task].noiseless else 0.5
        print(f"{name}, {task}: {mean:+.2f} ± {error:.2f} of the same with state in float32")
        worse += [task] * (mean > limit)
        plain += [task] * (mean > max(limit, 2 * error))
    print(f"{len(worse)} above 0.5 % or 0.05 dec (2 aimed at): {worse}, by two errors {plain}")
    most, most_plain = NARROW[name]
    assert len(worse) <= most
    assert len(plain) <= most_plain


def beyond(d: Difference, percent: float, decades: float) -> bool:
    """Whether it is worse by more than so many percent, or decades."""
    return d.diverged > 0 or d.mean > (decades if d.unit == "dec" else percent)


FAR = {4: {"modadd"}, 16: {"modadd", "policy"}}
"""Modular addition, for which 0.15 decades were aimed at; and the policy, of which seeds tell little: +30 ± 38 %."""


@pytest.mark.parametrize("workers", SEEDS)
def test_few_tasks_are_far_from_adamw(workers):
    """None was aimed at but for the GAN; a module that comes late may cost 10 %."""
    found = {t: difference(RECORDS, View(workers, parents=True), t, "onebit-adam-living") for t in FIRST if t != "gan"}
    far = {task: str(d) for task, d in found.items() if beyond(d, 10.0 if task == "late" else 3.0, 0.15)}
    print(f"{workers} workers: beyond 3 % (10 % where a module comes late) or 0.15 dec (none aimed at): {far}")
    assert set(far) <= FAR[workers]
    assert found["modadd"].mean <= 0.35


@pytest.mark.parametrize("optimizer", ["onebit-adam-living", "zero-one-adam-shared"])
def test_policies_end_as_with_adamw(optimizer):
    """One floor of all tensors under v, a tenth of their means, made them 5 % worse."""
    d = difference(RECORDS, View(parents=True), "policies", optimizer)
    assert d is not None
    assert d.seeds - d.diverged >= 5
    print(f"{optimizer}: 16 policies at once end {d} worse (at most 1 %)")
    assert d.mean <= 1.0


@pytest.mark.parametrize("optimizer", lab_page.DEFAULTS)
def test_defaults_end_alike_on_seeds_that_nothing_was_chosen_on(optimizer):
    found = {task: difference(lab_page.other_seeds(), lab_page.OTHER_SEEDS, task, optimizer) for task in FIRST}
    for task, d in found.items():
        chosen = difference(RECORDS, View(parents=True), task, optimizer)
        apart = abs(d.mean - chosen.mean) / math.hypot(d.error, chosen.error)
        print(f"{optimizer}, {task}: {d} on other seeds, {chosen} on the lab's: {apart:.1f} errors apart")
        assert (d.seeds, d.diverged) == (5, 0)
        assert apart <= 3.0


def test_a_living_variance_sends_little_over_a_whole_run():
    """In the lab, whose messages are short, and as large models' are."""
    message = Messages.size(BERT.scale_slots("block")[1], BERT) * 2 * BERT.world_size / BERT.real_numel
    numbers = Projections.of(BERT).width, SUMS * BERT.blocks_per_chunk
    rows = sum(Rows(BERT, 1, count, torch.device("cpu")).buffer.nbytes for count in numbers)
    renewal = rows * BERT.world_size / BERT.real_numel
    for optimizer, share in (("onebit-adam-living", 0.05), ("onebit-adam-living-0", 0.0)):
        runs = [r for key, r in RECORDS.found.items() if (key.optimizer, key.workers) == (optimizer, 4)]
        sent = sum(r["sent"] for r in runs) / len(runs)
        steps = 500
        warmup = max(1, int(share * steps))
        large = (8 * warmup + message * (steps - warmup) + renewal * renewals(steps - warmup)) / steps
        print(f"{optimizer}: {sent:.2f} bytes per parameter and step in the lab; of 340M, {steps} steps: {large:.3f}")
        renewed = renewal * renewals(steps - warmup) / steps
        print(f"of which the warm-up {8 * warmup / steps:.3f}, renewals {renewed:.3f}")
        assert large <= (0.82 if share else 0.45)  # 0.8 until renewals came after an eighth of the steps


def test_on_rows_seen_late_0_1_adam_diverges_at_adams_best_rate():
    found = difference(RECORDS, View(parents=True), "recsys", "zero-one-adam")
    print(f"recsys, zero-one-adam at Adam's tuned rate: {found}")
    assert found is not None
    assert (found.seeds, found.diverged, found.lost) == (3, 3, 0)


def test_where_a_frozen_lamb_would_diverge_the_guard_catches_it():
    """On rows that are seen late, at LAMB's best rate: without the guard the loss is a million times as large."""
    found = difference(RECORDS, View(parents=True), "recsys", "onebit-lamb")
    rewarms = [r["rewarms"] for r in View(parents=True).runs(RECORDS, "recsys", "onebit-lamb").values()]
    print(f"recsys, onebit-lamb at LAMB's tuned rate: {found} (limit +50 %), after {rewarms} re-warm-ups")
    assert found is not None
    assert (found.seeds, found.diverged) == (3, 0)
    assert found.mean <= 50.0
    assert min(rewarms) >= 1


@pytest.mark.parametrize("by", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("optimizer", ["onebit-lamb-living", "zero-one-adam-own", "onebit-adam-living"])
def test_ours_are_finite_where_what_they_compress_is(optimizer, by):
    view, parent = View(4, parents=True, by=by), CONTENDERS[optimizer].parent
    print({task: str(difference(RECORDS, view, task, optimizer)) for task in FIRST})
    for task in FIRST:
        ours, theirs = (view.runs(RECORDS, task, name) for name in (optimizer, parent))
        seeds = ours.keys() & theirs.keys()
        assert len(seeds) >= 2
        assert all(ours[seed]["metric"] is not None for seed in seeds if theirs[seed]["metric"] is not None), task


@pytest.mark.parametrize("by", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("optimizer", ["marsit-adam", "onebit-lion"])
def test_what_has_rates_of_its_own_is_finite_around_them(optimizer, by):
    """At AdamW's rate a step of signs would be several times as long."""
    for task in FIRST:
        runs = View(4, by=by).runs(RECORDS, task, optimizer)
        assert len(runs) >= 3, task
        assert all(run["metric"] is not None for run in runs.values()), task


@pytest.mark.parametrize(
    ("task", "weaker"), [("adders", "modadd"), ("gans", "gan"), ("policies", "policy"), ("adapters", None)]
)
def test_later_tasks_differ_little_between_seeds(task, weaker):
    """And what replaces a weaker one shows the default as far from AdamW as that does, within both errors."""
    view, decades = View(parents=True), TASKS[task].noiseless
    metrics = [run["metric"] for run in view.runs(RECORDS, task, "adamw").values()]
    assert len(metrics) >= 5
    spread = stdev(map(math.log10, metrics)) if decades else 100 * stdev(metrics) / fmean(metrics)
    limit = 0.05 if decades else 1.0
    print(f"{task}: {len(metrics)} seeds of AdamW differ by {spread:.3f} (limit {limit} {'dec' if decades else '%'})")
    assert spread < limit
    if weaker:
        ours, theirs = (difference(RECORDS, view, each, "onebit-adam-living") for each in (task, weaker))
        print(f"the default: {ours}, on {weaker} {theirs}")
        assert abs(ours.mean - theirs.mean) <= ours.error + theirs.error


APART = {4: [t for t in (*FIRST, "adapters") if TASKS[t].sources], 64: [t for t in QUICK if TASKS[t].sources]}
APART[16] = APART[4]
"""Tasks in which workers' data differ, by the number of workers."""


@pytest.mark.parametrize("alike", [0.5, 0.0])
@pytest.mark.parametrize("workers", APART)
def test_what_it_costs_that_workers_data_differ_is_recorded(workers, alike):
    view = View(workers, parents=True, alike=alike)
    for name in lab_page.APART:
        found = {task: difference(RECORDS, view, task, name) for task in APART[workers]}
        print(f"{name}, {view.title}: { {task: str(d) for task, d in found.items()} }")
        if name != lab_page.OURS[2] or (alike == 0 and workers < 64):
            assert all(d.seeds >= 5 for d in found.values())


def test_pages_say_how_zero_one_adam_ends_where_data_differ():
    ends = {
        (name, workers, task): difference(RECORDS, View(workers, parents=True, alike=0.0), task, name).mean
        for name, workers in product(("onebit-adam-living", "zero-one-adam-own"), APART)
        for task in APART[workers]
        if task != "gan" and not TASKS[task].noiseless
    }
    ours = {key: end for key, end in ends.items() if key[0] == "onebit-adam-living"}
    print(f"OneBitAdam where data differ, %: {ours}")
    assert all(end <= 2.0 for (_, workers, _), end in ours.items() if workers < 64)  # none of what diverges
    of_64 = f"the recommender ends {ours['onebit-adam-living', 64, 'recsys']:.0f} % worse"
    assert of_64 in (DOCS / "choose.md").read_text()
    others = [end for key, end in ends.items() if key not in ours and not math.isnan(end)]  # which diverge have none
    worst = f"up to {max(others):.0f} %"
    for page in (ROOT / "README.md", DOCS / "start.md", DOCS / "zero-one-adam.md", DOCS / "choose.md"):
        assert worst in page.read_text(), page
    assert worst in ZeroOneAdam.__doc__


def test_pages_say_how_marsit_and_slow_adapters_end():
    page = (DOCS / "choose.md").read_text()
    for task in ("mlp", "late", "recsys", "causal"):
        d = difference(RECORDS, View(alike=0.0), task, "marsit-adam")
        print(f"MarsitAdam, {View(alike=0.0).title}, {task}: {d}")
        assert d.seeds >= 3
        assert f"+{d.mean:.0f} % on" in page
    slow = difference(RECORDS, View(parents=True, by=0.3), "adapters", "onebit-adam-living")
    print(f"adapters at 0.3 of AdamW's rate: {slow} (at most 2 %)")
    assert slow.seeds >= 6
    assert slow.mean + slow.error <= 2.0


OF_FOUR, *_ = VIEWS = tuple(lab_page.COMPRESSED_BY.values())
WITHIN = {("compress-8", view): n for view, n in zip(VIEWS, (11, 12, 7, 9), strict=True)}
WITHIN |= {("compress-4", view): n for view, n in zip(VIEWS, (5, 7, 4, 4), strict=True)}
FORMS = {"8-none": 7, "8-fsdp": 7, "8-fsdp-8bit": 5, "4-none": 2, "4-fsdp": 3, "4-fsdp-8bit": 6}
WITHIN |= {(lab_page.BF16, OF_FOUR): 10} | {(f"compress-{name}", OF_FOUR): n for name, n in FORMS.items()}
WITHIN |= {(f"sgd-compress-{bits}", OF_FOUR): 5 for bits in (8, 4)}
WITHIN |= {("muon-compress-8", OF_FOUR): 3, ("muon-compress-4", OF_FOUR): 2}
"""Tasks on which AdamW on compressed gradients ends within 0.5 % (0.05 dec) of AdamW, its mean and one standard error:
as many as are recorded; and of six those on which SGD and Muon do. All are aimed at with 8 bits, 12 of 14 with 4;
bfloat16's hook says what seeds tell."""


@pytest.mark.parametrize(("name", "view"), WITHIN)
def test_compressed_gradients_end_as_near_as_recorded(name, view):
    tasks, near, untold = lab_page.near(RECORDS, view, name)
    for task in tasks:
        d = difference(RECORDS, view, task, name)
        print(f"{name}, {view.title}, {task}: {d}")
        assert d.seeds >= (20 if name in ("compress-8", "compress-4") else 5)
    print(f"{name}, {view.title}: {len(near)} of {len(tasks)} within 0.5 %: {near}; untold: {untold}")
    assert len(tasks) >= (11 if CONTENDERS[name].parent == "adamw" else len(lab_page.OF_MATRICES))
    assert len(near) >= WITHIN[name, view]


NEAR_MUON = {view: (0.25 if view.alike else 1.0, n) for view, n in zip(VIEWS, (2, 2, 3, 3), strict=True)}
NEAR_MUON |= {View(parents=True, by=2.0): (1.0, 5), View(16, parents=True, by=2.0): (1.0, 6)}
"""What is aimed at on five of six tasks, in percent; and on how many it is recorded."""


@pytest.mark.parametrize("view", NEAR_MUON)
def test_one_bit_muon_ends_as_near_as_recorded(view):
    percent, recorded = NEAR_MUON[view]
    tasks, near, untold = lab_page.near(RECORDS, view, "onebit-muon", percent)
    for task in tasks:
        d = difference(RECORDS, view, task, "onebit-muon")
        print(f"{view.title}, {task}: {d}")
        assert d.seeds >= (20 if view.by == 1.0 else 5)
        assert d.diverged == 0
    told = [task for task in near if task not in untold]
    print(f"{view.title}: {len(near)} of {len(tasks)} within {percent} % of Muon (5 aimed at): {near}; told: {told}")
    assert sorted(tasks) == sorted(lab_page.OF_MATRICES)
    assert len(near) >= recorded


def test_one_bit_under_adam_loses_what_the_page_says():
    tasks = [t for t in FIRST if not TASKS[t].noiseless and t not in ("regression", "policy")]
    least, *_, most = sorted(difference(RECORDS, OF_FOUR, task, "compress-1").mean for task in tasks)
    print(f"at one bit {least:.1f} to {most:.1f} % worse on {tasks}")
    assert f"{least:.0f} to {most:.0f} % worse" in (DOCS / "compress.md").read_text()


def test_adamw_sends_eight_bytes_ours_its_warmup_and_messages():
    for key, record in RECORDS.found.items():
        if key.optimizer == "adamw":
            assert record["sent"] == pytest.approx(8.0, rel=2e-3)
        if key.optimizer == "onebit-adam" and key.workers == 4 and not record["rewarms"] and not diverged(record):
            assert 0.15 * 8 < record["sent"] < 0.15 * 8 + 1.5


def test_the_pages_show_the_tables_of_the_runs():
    assert tables_in(DOCS / "choose.md", "LAB") == lab_page.headline_table(RECORDS).strip()
    assert tables_in(DOCS / "choose.md", "APART") == lab_page.apart_table(RECORDS).strip()
    assert tables_in(DOCS / "compress.md", "LAB") == lab_page.compressed_table(RECORDS).strip()
    assert tables_in(TABLES / "lab.md") == lab_page.page_tables(RECORDS).strip()
    assert tables_in(TABLES / "ablations.md") == lab_page.ablations(RECORDS).strip()
    assert tables_in(TABLES / "muon.md") == lab_page.muon_tables(RECORDS).strip()
    shown = (lab_page.RESULTS / "table.md").read_text()
    assert shown == publish.page(publish.every_table(RECORDS))
    assert "nan" not in shown.lower()


def test_numerics_says_what_the_runs_say():
    text, of_4 = (DOCS / "numerics.md").read_text(), View(parents=True)
    living, frozen = "onebit-adam-living", "onebit-adam"
    views = (living, of_4), (frozen, of_4), (living, View(16, parents=True))
    fine = [sum(not difference(RECORDS, view, task, name).misses for task in FIRST) for name, view in views]
    told = "{} of 14 tasks end at most 1 % (0.05 decades) worse with 4 workers ({} with a frozen variance), {} with 16."
    assert told.format(*fine) in text
    for task, told in (("gan", "GAN ({:+.0f} %, frozen {:+.0f} %)"), ("modadd", "({:+.1f} decades, frozen {:+.1f})")):
        assert told.format(*(difference(RECORDS, of_4, task, name).mean for name in (living, frozen))) in text
    assert f"{sent(RECORDS, of_4, living):.2f} bytes per parameter and step" in text
    assert f"sends {sent(RECORDS, of_4, 'zero-one-adam-shared'):.2f} bytes" in text
    assert f"rounds of one {sent(RECORDS, View(), 'zero-one-adam-own'):.2f}" in text


AGAIN = [
    ("mlp", "adamw", TUNED_AT, tuning.SEEDS[0]),
    ("mlp", "onebit-adam", TUNED_AT, tuning.SEEDS[0]),
    ("mlp", "zero-one-adam-own", TUNED_AT, 4),
    ("resnet", "onebit-lamb-living", TUNED_AT, tuning.SEEDS[0]),
    ("recsys", "zero-one-adam-own", 16, 1),
    ("recsys", "onebit-adam-living", 16, 1),
]
"""Task, optimizer, workers, seed."""


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize(("task", "optimizer", "workers", "seed"), AGAIN)
def test_a_run_made_again_has_the_recorded_bits(task, optimizer, workers, seed):
    """On another kind of processor, or with another torch, sums round otherwise: there the run must end near."""
    wanted = (task, optimizer, workers, seed)
    key = next(k for k in RECORDS.found if (k.task, k.optimizer, k.workers, k.seed) == wanted)
    record, again = RECORDS.found[key], run(key)
    same = {name: record[name] for name in launch.machine()} == launch.machine()
    print(f"{key}: {again['metric']!r}, recorded {record['metric']!r} on {'the same' if same else 'another'} machine")
    if same:
        assert (again["metric"], again["curve"]) == (record["metric"], record["curve"])
    assert again["sent"] == record["sent"]
    assert math.isclose(again["metric"], record["metric"], rel_tol=0.1)
