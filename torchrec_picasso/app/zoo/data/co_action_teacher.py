"""Labels of clicks by a random teacher over pairs of the target and each click of the history.

Each target id is a small random network, each click id a random input vector; the outputs are
summed over the history. Neither target nor click alone nor their similarity determines the label:
each pair has to be learned. With few ids (``data.max_rows``) pairs repeat.

Source: the co-action unit of Bian et al., CAN: Feature Co-Action for Click-Through Rate Prediction
(arXiv 2011.05625), section 4.1, with random weights.

Shape letters: N clicks of all histories, n samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from torchrec_picasso.app.zoo.data.clicks import Clicks

_TEACHER, _DRAWS = 11, 12  # random streams
_READ, _UNITS = 4, 4  # columns of a network's input, and its units
_SPREAD = 3.0  # standard deviation of the logit over histories of distinct clicks
_SAMPLES_AT_ONCE = 4096  # some 10 MB of networks with histories of 20


def with_co_action_labels(clicks: Clicks, seed: int, part: int = 0) -> Clicks:
    """The same samples with labels drawn from the teacher's probabilities.

    Args:
        clicks: Samples; histories have the length that models read.
        seed: Seed of the teacher and of the labels.
        part: Window of the file, which changes the draws but not the teacher.
    """
    chance_n = 1 / (1 + np.exp(-co_action_logits(clicks, seed)))
    drawn_n = np.random.default_rng([seed, _DRAWS, part]).random(len(clicks))
    return replace(clicks, clicked=(drawn_n < chance_n).astype(np.float32))


def co_action_logits(clicks: Clicks, seed: int) -> NDArray[np.float64]:
    """The teacher's logits, shape ``(n,)``; 0 for an empty history.

    Args:
        clicks: Samples; the teacher reads the first target column and its history.
        seed: Seed of the teacher.
    """
    column = next(iter(clicks.targets))
    teacher = np.random.default_rng([seed, _TEACHER])
    num_rows = clicks.num_rows(column)
    # drawn id by id, so an id's numbers do not depend on num_rows
    drawn = teacher.normal(size=(num_rows, _READ + _READ * _UNITS + _UNITS))
    read, weights, outputs = np.split(drawn, [_READ, _READ + _READ * _UNITS], axis=1)
    weights = weights.reshape(num_rows, _READ, _UNITS)
    target_n, history = clicks.targets[column], clicks.histories[column]
    logits = [np.empty(0)]
    for first in range(0, len(clicks), _SAMPLES_AT_ONCE):
        samples_m = np.arange(first, min(first + _SAMPLES_AT_ONCE, len(clicks)))
        lists = history.take(samples_m)
        sample_N = np.repeat(np.arange(len(samples_m)), lists.lengths_n)
        network_N = target_n[samples_m][sample_N]
        units = np.tanh(np.einsum("nr,nru->nu", read[lists.joined()], weights[network_N]))
        given_N = np.einsum("nu,nu->n", units, outputs[network_N])
        summed_m = np.bincount(sample_N, weights=given_N, minlength=len(samples_m))
        logits.append(summed_m / np.sqrt(_UNITS * np.maximum(lists.lengths_n, 1)))
    logits_n: NDArray[np.float64] = _SPREAD * np.concatenate(logits)
    return logits_n
