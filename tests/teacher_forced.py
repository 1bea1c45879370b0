"""How far one compressed step from equal states lies from Algorithm 1's in float64.

Two runs part for good once one sign flips; from equal states they may differ only by rounding, and
in signs only where a number is zero to rounding. States and outcomes are those of ``reference_adam``
or ``reference_lamb``, in the unit in which the momentum travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import reference_adam
import reference_lamb

State = reference_adam.State | reference_lamb.State
Outcome = reference_adam.Exchange


def worst(so_far: float, found: np.ndarray) -> float:
    """The largest; NaN if any is."""
    return float(np.max(found, initial=so_far))


class Deviation:
    """The largest of each kind, over all steps."""

    def __init__(self) -> None:
        self.signs = self.differing = 0
        self.largest_differing = self.scale = self.error = self.parameter = 0.0

    def compare_exchange(
        self,
        before: State,
        after: State,
        terms_of_m: Sequence[np.ndarray],
        parts: Sequence[np.ndarray],
        spec: Outcome,
        travelled: np.ndarray,
    ) -> np.ndarray:
        """Signs, scales and residuals of all ranks and servers; returns where all signs are equal.

        ``terms_of_m`` are the sums of the magnitudes of which each rank's momentum is the sum;
        ``travelled`` is the momentum that the servers returned.
        """
        agreed = np.ones(before.x.size, dtype=bool)
        for i, c in enumerate(spec.sent):
            # What the rank has sent is what it had less what it kept.
            sent, s = c - after.worker_error[i], spec.worker_scale[i]
            equal = self._count_signs(c, sent)
            agreed &= equal
            # Rounding is relative to the terms of the sum, of which the smallest tell the scale best.
            terms = terms_of_m[i] + np.abs(before.worker_error[i]) + s
            self.scale = worst(self.scale, np.abs(np.median(np.abs(sent)[terms <= np.median(terms)]) / s - 1))
            off = np.abs(after.worker_error[i] - spec.worker_error[i])[equal] / terms[equal]
            self.error = worst(self.error, off)
        equal = agreed & self._count_signs(spec.averaged, travelled)
        for elements, s in zip(parts, spec.server_scale, strict=True):
            magnitude = np.abs(travelled[elements])
            assert (magnitude == magnitude[0]).all()
            self.scale = worst(self.scale, np.abs(magnitude[0] / s - 1))
            terms = np.abs(before.server_error[elements]) + np.mean(spec.worker_scale) + s
            off = np.abs(after.server_error - spec.server_error)[elements] / terms
            self.error = worst(self.error, off[equal[elements]])
        return equal

    def _count_signs(self, reference: np.ndarray, ours: np.ndarray) -> np.ndarray:
        """Returns where the sign of ``ours`` is that of ``reference`` (before compression)."""
        equal = reference_adam.sign(reference) == reference_adam.sign(ours)
        self.signs += equal.size
        self.differing += int((~equal).sum())
        rms = np.sqrt(np.mean(reference**2))
        self.largest_differing = worst(self.largest_differing, np.abs(reference[~equal]) / rms)
        return equal

    def compare_parameters(
        self, before: State, after: State, spec: reference_adam.Outcome | reference_lamb.Update, where: np.ndarray
    ) -> None:
        moved = np.abs(spec.x - before.x)
        off = np.abs(after.x - spec.x)[where] / (np.abs(before.x) + moved)[where]
        self.parameter = worst(self.parameter, off)

    def check(self, name: str) -> None:
        """Prints all of it, then checks it."""
        share = self.differing / self.signs
        print(f"{name}: signs that differ: {share:.1e} of {self.signs} (limit 1e-5)")
        print(f"{name}: largest |c| / rms among them: {self.largest_differing:.1e} (limit 1e-6)")
        print(f"{name}: scales, relative: {self.scale:.1e} (limit 1e-6)")
        print(f"{name}: residuals, of the sum's terms: {self.error:.1e} (limit 5e-7)")
        print(f"{name}: parameters, of |x| + |step|: {self.parameter:.1e} (limit 1e-6)")
        assert share <= 1e-5
        assert self.largest_differing < 1e-6
        assert self.scale <= 1e-6
        assert self.error <= 5e-7
        assert self.parameter <= 1e-6


class LambDeviation(Deviation):
    """Also of what only 1-bit LAMB has."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = self.ratio = self.coefficient = 0.0

    def compare_layers(
        self,
        layers: Sequence[slice],
        after: reference_lamb.State,
        c: np.ndarray,
        spec: reference_lamb.Update,
        agreed: np.ndarray,
    ) -> None:
        """Only of layers all of whose signs are equal: one that differs is another g, v and maybe r."""
        for i, layer in enumerate(layers):
            if not agreed[layer].all():
                continue
            self.variance = worst(self.variance, np.abs(after.v[layer] / spec.v[layer] - 1))
            self.ratio = worst(self.ratio, np.abs(after.r[i] / spec.r[i] - 1))
            self.coefficient = worst(self.coefficient, np.abs(c[i] / spec.c[i] - 1))

    def check(self, name: str) -> None:
        super().check(name)
        print(f"{name}: fresh variance, relative: {self.variance:.1e} (limit 5e-6)")
        print(f"{name}: ratios r, relative: {self.ratio:.1e} (limit 5e-6)")
        print(f"{name}: coefficients c, relative: {self.coefficient:.1e} (limit 5e-6)")
        # Where m_t and m_{t-1} have the same sign, g = (m_t - beta1 * m_{t-1})/(1 - beta1) is a difference
        # of nearly equal numbers: the 6e-8 of a float32 grows by (1 + beta1)/(1 - beta1) = 19, and twice
        # that in g^2: 2e-6, of which v takes its share. r = v_{T_w}/v and c = r * c_avg inherit that.
        assert self.variance <= 5e-6
        assert self.ratio <= 5e-6
        assert self.coefficient <= 5e-6
