"""Validation metrics for each data source, by verl's names: mean@n, best@n, worst@n, maj@n, and pass@n beside them.

N is the number of samples of each prompt; n runs over the powers of two below N, and N. What is said of n of the N
samples holds for n draws from them with replacement, as verl's bootstrap has it; where that has a closed form, it is
computed and not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megappo.data import batch
from megappo.metric_names import subset_sizes
from megappo.report.reward_extras import predictions, reward_extras

Metrics = dict[str, float]
Floats = npt.NDArray[np.float64]

DRAWS = 1000
"""Of samples, for majorities."""
SEED = 42

VALIDATION_COLUMNS = ("data_source", "prompt_index", "response_ids", "score", "failed", "extras")
"""What :func:`validation_metrics` reads."""


def validation_metrics(rows: pa.Table) -> Metrics:
    """``val-core/<data_source>/<acc or reward>/mean@N`` and so on, and ``val-aux`` of everything else.

    The core value is accuracy where the reward function returns ``acc``, else the score. Of it, mean@N, best@N, maj@N
    and pass@N are ``val-core``. Rows whose reward failed count as 0; ``val-aux/<data_source>/failed_rows`` says how
    many there are. Majorities are of ``pred``, what the reward function took for the answer; pass@n is of accuracies of
    0 or 1.
    """
    sources = np.array(rows.column("data_source").to_pylist())
    prompts = batch.column(rows, "prompt_index")
    answers = predictions(rows)
    measured = {**reward_extras(rows), "reward": batch.column(rows, "score").astype(float)}
    failed = batch.column(rows, "failed")
    lengths = batch.lengths(rows, "response_ids").astype(float)
    out: Metrics = {}
    for source in sorted(set(sources)):
        here = np.flatnonzero(sources == source)
        here = here[np.argsort(prompts[here], kind="stable")]  # the samples of a prompt next to each other
        samples = round(len(here) / len(np.unique(prompts[here])))
        present = {name: values[here] for name, values in measured.items() if not np.isnan(values[here]).all()}
        core = "acc" if "acc" in present else "reward"
        votes_pn = answers[here].reshape(-1, samples)
        for name, values in present.items():
            for metric, value in _of_samples(values.reshape(-1, samples), votes_pn, name == "acc"):
                kind = "val-core" if name == core and _is_core(metric, samples) else "val-aux"
                out[f"{kind}/{source}/{name}/{metric}"] = value
        out[f"val-aux/{source}/response_length/mean@{samples}"] = float(lengths[here].mean())
        out[f"val-aux/{source}/failed_rows"] = float(failed[here].sum())
    return out


def canary_metrics(rows: pa.Table) -> Metrics:
    """The same under ``canary/<data_source>``."""
    return {f"canary/{name.split('/', 1)[1]}": value for name, value in validation_metrics(rows).items()}


def _is_core(metric: str, samples: int) -> bool:
    return metric.split("/")[0] in {f"{kind}@{samples}" for kind in ("mean", "best", "maj", "pass")}


def _of_samples(values_pn: Floats, votes_pn: npt.NDArray, accuracy: bool) -> Iterator[tuple[str, float]]:
    """(name, value) of every metric of one measured number; a prompt that lacks it in a sample is in the mean only."""
    samples = values_pn.shape[1]
    yield f"mean@{samples}", float(np.nanmean(values_pn))
    whole = ~np.isnan(values_pn).any(axis=1)
    if samples == 1 or not whole.any():
        return
    values_pn, votes_pn = values_pn[whole], votes_pn[whole]
    yield f"std@{samples}", float(values_pn.std(axis=1).mean())
    for n in subset_sizes(samples):
        for name, signed_pn, sign in (("best", values_pn, 1.0), ("worst", -values_pn, -1.0)):
            means_p, deviations_p = best_of(signed_pn, n)
            yield f"{name}@{n}/mean", float(sign * means_p.mean())
            yield f"{name}@{n}/std", float(deviations_p.mean())
        if (votes_pn != "").any():
            drawn = [majority(row, votes, n) for row, votes in zip(values_pn, votes_pn, strict=True)]
            yield f"maj@{n}/mean", float(np.mean([mean for mean, _ in drawn]))
            yield f"maj@{n}/std", float(np.mean([deviation for _, deviation in drawn]))
        if accuracy and np.isin(values_pn, (0.0, 1.0)).all():
            yield f"pass@{n}", float(pass_at(values_pn.sum(axis=1).astype(int), samples, n).mean())


def best_of(values_pn: Floats, n: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation [prompts] of the largest of n draws with replacement from each prompt's values.

    The i-th smallest of N values is the largest of n draws with probability (i/N)^n - ((i-1)/N)^n.
    """
    samples = values_pn.shape[1]
    weights_n = np.diff((np.arange(samples + 1) / samples) ** n)
    ordered_pn = np.sort(values_pn, axis=1)
    means_p = ordered_pn @ weights_n
    return means_p, np.sqrt((ordered_pn - means_p[:, None]) ** 2 @ weights_n)


def majority(values_n: Floats, votes_n: npt.NDArray, n: int) -> tuple[float, float]:
    """Mean and standard deviation of the value of the commonest vote among n draws with replacement.

    Of votes that are equally common the one that was drawn first counts, and of its values the first. The draws follow
    from n and N alone. (Majority voting: "self-consistency", Wang et al., arXiv:2203.11171.)
    """
    _, codes_n = np.unique(votes_n, return_inverse=True)
    drawn_dn = np.random.default_rng(SEED).integers(0, len(values_n), (DRAWS, n))
    votes_dn = codes_n[drawn_dn]
    kinds = int(codes_n.max()) + 1
    tally_dk = np.bincount((votes_dn + kinds * np.arange(DRAWS)[:, None]).ravel(), minlength=DRAWS * kinds)
    counts_dn = tally_dk.reshape(DRAWS, kinds)[np.arange(DRAWS)[:, None], votes_dn]
    winners_d = values_n[drawn_dn[np.arange(DRAWS), counts_dn.argmax(axis=1)]]
    return float(winners_d.mean()), float(winners_d.std())


def pass_at(correct_p: npt.NDArray[np.int64], samples: int, k: int) -> Floats:
    """The unbiased estimate of the probability that at least one of k samples is right, for each prompt.

    1 - C(N - c, k) / C(N, k) with c of N samples right: Chen et al. (arXiv:2107.03374), equation 1, as the product
    over i of 1 - k / i from i = N - c + 1 to N.
    """
    i_n = np.arange(1, samples + 1)
    wrong_pn = np.where(i_n > (samples - correct_p)[:, None], 1.0 - k / i_n, 1.0)
    enough_p = samples - correct_p < k  # then k samples cannot all be wrong
    return np.where(enough_p, 1.0, 1.0 - wrong_pn.prod(axis=1))
