# SPDX-License-Identifier: Apache-2.0
"""How soon blocks come back, learned while they are served.

Blocks are told apart by classes, which are points in a grid of factors. A factor is a property of
the request that a block came from, as the turn of its conversation. The rate of returns of a class
at an age is a product: a base rate of the age, a number for each of the factors' levels, a shape
over ages for each kind and each length of answers, and a number for the class itself. A class that
was seen for the first time therefore has a sensible rate at once, and one that was seen often its
own.

Pure and deterministic: ages are passed in.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIRST_SECONDS = 4.0
_BINS_PER_OCTAVE = 2.5
BINS = 38
"""Ages up to 4 s are the first bin, and the last begins after a day."""

EDGES = np.concatenate(([0.0], _FIRST_SECONDS * 2.0 ** (np.arange(BINS - 1) / _BINS_PER_OCTAVE)))
"""Where each bin begins, in seconds."""
_EDGES: list[float] = EDGES.tolist()
_WIDTHS = np.diff(EDGES, append=EDGES[-1] * 2.0 ** (1 / _BINS_PER_OCTAVE))
_LEFT_SHARE = 0.6
"""Of the width of its bin, what a block of that bin is taken to have before it."""

_BASE_RATE = 0.15
_BASE_WIDTHS = 5.0
_LEVEL_EVENTS = 25.0
_CLASS_EVENTS = 40.0
"""What rates are before there are events, and how many events outweigh that. Chosen on Mooncake's
conversation trace: `_CLASS_EVENTS` and `_SHAPED` on all of it, the others on its first half."""

_SHAPED = 4
_ROUNDS = 3
_FIRST_BINS = 24
"""Bins that blocks are taken to be seen in before anything is learned: up to 40 minutes."""

_MOST_HAZARD = 500.0
"""Whose exponential is still a number."""
_LEAST_RATE = 1e-12

_PRIOR = _BASE_RATE / (EDGES + _FIRST_SECONDS)


class ReturnRates:
    """Rates of return by class and age, and what keeping a block is worth by them.

    Args:
        priors: for each factor what is expected of its levels, before anything came back, in
            comparison to one another. Shapes over ages are learned for the first four
            factors.
    """

    def __init__(self, priors: Sequence[Sequence[float]]) -> None:
        self._priors = [np.array(each, np.float64) for each in priors]
        self._levels = levels = [len(each) for each in priors]
        self._ids: dict[tuple[int, ...], int] = {}
        self._factors = np.zeros((64, len(levels)), np.int64)
        self._events = np.zeros((64, BINS))
        self._exposure = np.zeros((64, BINS))
        self._log_class = array("q")
        self._log_age = array("d")
        self._log_weight = array("d")
        self._log_back = array("d")
        self._base = _PRIOR.copy()
        self._theta = [each.copy() for each in self._priors]
        self._shapes = [np.ones((count, BINS)) for count in levels[:_SHAPED]]
        self._own = np.ones(64)
        self._values = np.zeros((64, BINS))
        self._seen = _FIRST_BINS

    @property
    def classes(self) -> int:
        """Classes seen so far."""
        return len(self._ids)

    def class_of(self, factors: tuple[int, ...]) -> int:
        """The number of the class with these levels."""
        known = self._ids.get(factors)
        if known is not None:
            return known
        number = self._ids[factors] = len(self._ids)
        if number == len(self._factors):
            self._grow()
        self._factors[number] = factors
        self._values[number, : self._seen] = _worth_of_one(self._rates(np.array([number]))[0])
        return number

    def worth(self, number: int, age: float) -> float:
        """What keeping a block of a class is worth at an age: hits per second of keeping."""
        return self._values.item(number, bisect_right(_EDGES, age) - 1)

    def worths(self, numbers: Ints, ages: Floats) -> Floats:
        """The same for many."""
        return self._values[numbers, _bins_of(ages)]

    def note(self, number: int, age: float, weight: float, back: float) -> None:
        """Blocks of a class are followed no further at this age.

        Args:
            number: of the class.
            age: in seconds.
            weight: of the blocks.
            back: of this, that came back.
        """
        self._log_class.append(number)
        self._log_age.append(age)
        self._log_weight.append(weight)
        self._log_back.append(back)

    def learn(self, numbers: Ints, ages: Floats, weights: Floats) -> None:
        """Learn from what was noted, and from blocks that are followed still: their classes, ages
        and weights."""
        count = self.classes
        if not count:
            return
        logged = np.frombuffer(self._log_class, np.int64).copy()
        log_ages = np.frombuffer(self._log_age).copy()
        log_weights = np.frombuffer(self._log_weight).copy()
        back = np.frombuffer(self._log_back).copy()
        for each in (self._log_class, self._log_age, self._log_weight, self._log_back):
            del each[:]
        places = logged * BINS + _bins_of(log_ages)
        back_by_class = np.bincount(places, back, minlength=count * BINS)
        self._events[:count] += back_by_class.reshape(count, BINS)
        self._exposure[:count] += _exposure(count, logged, log_ages, log_weights)
        exposure = self._exposure[:count] + _exposure(count, numbers, ages, weights)
        self._seen = max(2, int(np.flatnonzero(exposure.sum(0)).max(initial=0)) + 1)
        followed = np.flatnonzero(exposure.sum(1))
        self._fit(followed, self._events[followed, : self._seen], exposure[followed, : self._seen])
        self._values[:count, : self._seen] = _worth(self._rates(np.arange(count)))
        self._values[:count, self._seen :] = 0.0

    def _fit(self, numbers: Ints, events: Floats, exposure: Floats) -> None:
        """Fit the numbers of which rates are products to what came back of some classes."""
        bins = events.shape[1]
        levels = [self._factors[numbers, i] for i in range(len(self._levels))]
        widths, prior = _WIDTHS[:bins], _PRIOR[:bins]
        events_by_bin, events_by_class = events.sum(0), events.sum(1)
        product = np.ones(len(numbers))
        for level, theta in zip(levels, self._theta, strict=True):
            product *= theta[level]
        for _ in range(_ROUNDS):
            self._base[:bins] = (events_by_bin + prior * _BASE_WIDTHS * widths) / (
                product @ exposure + _BASE_WIDTHS * widths
            )
            expected = exposure @ self._base[:bins]
            for i, (level, theta) in enumerate(zip(levels, self._theta, strict=True)):
                product /= theta[level]
                got = np.bincount(level, events_by_class, minlength=len(theta))
                wanted = np.bincount(level, expected * product, minlength=len(theta))
                theta[:] = (got + _LEVEL_EVENTS * self._priors[i]) / (wanted + _LEVEL_EVENTS)
                product *= theta[level]
        left = exposure * self._base[:bins] * product[:, None]
        column = np.arange(bins)
        for level, shape in zip(levels, self._shapes, strict=False):
            size = len(shape) * bins
            places = (level[:, None] * bins + column).ravel()
            got = np.bincount(places, events.ravel(), minlength=size)
            wanted = np.bincount(places, left.ravel(), minlength=size)
            shape[:, :bins] = ((got + _LEVEL_EVENTS) / (wanted + _LEVEL_EVENTS)).reshape(-1, bins)
            left *= shape[level, :bins]
        self._own[numbers] = (events_by_class + _CLASS_EVENTS) / (left.sum(1) + _CLASS_EVENTS)

    def _rates(self, numbers: Ints) -> Floats:
        """Returns per second of the classes `numbers`, by those bins that blocks were seen in."""
        factors = self._factors[numbers]
        product = self._own[numbers]
        for i, theta in enumerate(self._theta):
            product = product * theta[factors[:, i]]
        rates: Floats = self._base[: self._seen] * product[:, None]
        for i, shape in enumerate(self._shapes):
            rates *= shape[factors[:, i], : self._seen]
        return rates

    def _grow(self) -> None:
        for name in ("_factors", "_events", "_exposure", "_own", "_values"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self._own[len(self._own) // 2 :] = 1


def _bins_of(ages: Floats) -> Ints:
    """The bins of ages in seconds."""
    return np.searchsorted(EDGES, ages, "right") - 1


def _exposure(count: int, numbers: Ints, ages: Floats, weights: Floats) -> Floats:
    """Seconds that weights were followed, by class and bin, from age 0 to `ages`."""
    bins = _bins_of(ages)
    places = numbers * BINS + bins
    reached = np.bincount(places, weights, minlength=count * BINS).reshape(count, BINS)
    last = np.bincount(places, weights * (ages - EDGES[bins]), minlength=count * BINS)
    passed = np.cumsum(reached[:, ::-1], 1)[:, ::-1] - reached
    return last.reshape(count, BINS) + passed * _WIDTHS


def _worth(rates: Floats) -> Floats:
    """Of blocks by class and bin: the most hits per second that keeping them for some time gives.

    Not the rate of the moment: users pause before they go on.
    """
    own, own_held, left, held = _kept(rates)
    best: Floats = (1 - own) / own_held
    for b in range(rates.shape[1] - 1):
        later = slice(b + 1, None, _HORIZON_STEP)
        scale = own[:, b : b + 1] / left[:, b : b + 1]
        back = 1 - scale * left[:, later]
        kept = own_held[:, b : b + 1] + scale * (held[:, later] - held[:, b : b + 1])
        np.maximum(best[:, b], (back / kept).max(1), out=best[:, b])
    return best


def _worth_of_one(rates: Floats) -> Floats:
    """The same of one class, for which a table of all pairs of bins takes less time."""
    own, own_held, left, held = (each[0] for each in _kept(rates[None, :]))
    scale = (own / left)[:, None]
    later = _LATER[: len(rates), : len(rates)]
    kept = own_held[:, None] + scale * (held - held[:, None])
    worths = (1 - scale * left) / np.where(later, kept, np.inf)
    best: Floats = np.maximum((1 - own) / own_held, worths.max(1))
    return best


_HORIZON_STEP = 2
"""Every second bin is a time that keeping may end."""
_DISTANCE = np.arange(BINS) - np.arange(BINS)[:, None]
_LATER = (_DISTANCE > 0) & (_DISTANCE % _HORIZON_STEP == 1)


def _kept(rates: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """By class and bin: the share of blocks that are not back by the end of a bin that they are in,
    and the seconds that they are held in it; the share that is not back by its end, of all, and the
    seconds that these were held by then."""
    rates = np.maximum(rates, _LEAST_RATE)
    hazard = rates * _WIDTHS[: rates.shape[1]]
    left = np.exp(-np.minimum(np.cumsum(hazard, 1), _MOST_HAZARD))
    before = np.concatenate((np.ones((len(rates), 1)), left[:, :-1]), 1)
    held = np.cumsum((before - left) / rates, 1)
    own = np.exp(-_LEFT_SHARE * hazard)
    return own, (1 - own) / rates, left, held
