"""Every formula, once, in the elementwise part of Triton.

Called from Python a rule computes on torch tensors: it is the arithmetic of the eager ops, and the specification.
Called from a kernel it is the kernel's; the C kernels include what ``native.generate`` prints from this file and from
``bit_rules``, which has the formulas on 32-bit words. Each operation rounds once, in the order of the text: nothing is
contracted or reassociated, so that all three have the same bits. ``k`` is a tensor's row of the table of coefficients;
annotations are for C alone, which knows no dtypes: a ``float`` is what Python's is, a double.

Lines of algorithms are numbered as in ``fusedonebit.reference``: 1-bit Adam's as in 1-bit LAMB's Algorithm 1.

``c`` is the compensated momentum (momentum + residual), ``s`` its scale, ``e = c - s*sign(c)`` the residual, ``m``
the momentum, ``v`` the variance.
"""

from __future__ import annotations

from .columns import Coef, Factor, Group, Layer
from .jit import of, rule, tl

(BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, STEP_SIZE, DECAY, RSQRT_BIAS2, EPS, UNIT, LR) = tuple(Coef)[:10]
(UNBIAS1, WEIGHT_DECAY, C_MIN, C_MAX, BETA3, R_MIN, R_MAX, R_THRESHOLD, GLOBAL_RATIO, GRAD_LIMIT) = tuple(Coef)[10:]
AVERAGE, RATIO, COEFFICIENT = Layer
FACTOR, USUAL, LEAST = Factor
COLUMNS = len(Coef)
CORRECTION1, CORRECTION2, FLOOR = Group
GROUP_COLUMNS = COLUMNS + len(Group)
MOST_STEPS = 4294967296.0
"""Steps, or as good as infinitely many: beta^t is 0 then."""

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
SHARE_OF_NORM = 0.4375  # the norm of a layer's update over that of the bits that stand for it (docs/numerics.md)
LEAST_UNIT = 1e-30  # by which momentum can still be divided
LARGEST = 3.4028234663852886e38  # of the finite float32 numbers
INFINITY = float("inf")


# ---------------------------------------------------------------- what counts


@rule
def finite(x) -> bool:
    """Neither infinite nor NaN."""
    return tl.abs(x) <= LARGEST


@rule
def counts(g, k) -> bool:
    """Neither too large to count nor NaN."""
    return tl.abs(g) <= of(k, GRAD_LIMIT)


@rule
def counted(g, k):
    """Return a gradient, NaN where it is too large to count: nothing that is made of it is finite then."""
    return tl.where(counts(g, k), g, float("nan"))  # a constant would not equal itself: Triton refuses the next launch


@rule
def clip_factor(norm, most):
    """Return what brings a gradient's ``norm`` down to ``most``, as torch's ``clip_grad_norm_`` does; 0 if infinite."""
    factor = tl.div_rn(1.0, norm + CLIP_EPS) * most
    return tl.where(factor > 1.0, 1.0, factor)


# ---------------------------------------------------------------- the table of coefficients


@rule
def squared(y: float, x: float, n: int) -> float:
    """y * x where the lowest bit of n is set, else y: with x squared and n halved again and again, y becomes x^n."""
    return tl.where((n & 1) != 0, y * x, y)


@rule
def coefficients(lr: float, decay: float, power1: float, power2: float):
    """STEP_SIZE, DECAY, RSQRT_BIAS2 and UNBIAS1, of beta1^t and beta2^t (Adam, Algorithm 1)."""
    bias1 = 1.0 - power1
    return lr / bias1, 1.0 - lr * decay, 1.0 / tl.sqrt(1.0 - power2), 1.0 / bias1


@rule
def floored(eps: float, floor: float, mean: float, root: float) -> float:
    """eps^2 + floor * mean / (1 - beta2^t), inside denominators' root; without a floor eps, behind it."""
    return tl.where(floor > 0.0, eps * eps + floor * mean * root * root, eps)


@rule
def seen(x: float, mean: float) -> float:
    """x, or 0 in tensors that have no variance: they wait for one, or would explode."""
    return tl.where(mean > 0.0, x, 0.0)


@rule
def update_square(s: float, unbias: float, root: float) -> float:
    """Square what a block adds to the norm of an update: its scale, unbiased, times the root of its weight."""
    norm = s * unbias * root
    return norm * norm


# ---------------------------------------------------------------- bits and residuals


@rule
def negative(x):
    """-x; Triton's own is 0 - x, which makes 0 of 0 where all other backends make -0."""
    return x * -1.0


@rule
def residual(c, s, TERNARY: tl.constexpr):
    """Form the deferred error e = c - s*sign(c) (1-bit Adam, lines 7 and 10).

    sign(0) is 1, or 0 where TERNARY (Tarasov & Ershov, section 4).
    """
    sent = tl.where(c >= 0, s, negative(s))
    if TERNARY:
        sent = tl.where(c != 0, sent, 0.0)
    return c - sent


# ---------------------------------------------------------------- denominators and moments


@rule
def denominator(v, k, EPS_INSIDE_SQRT: tl.constexpr):
    """sqrt(v)/sqrt(1 - beta2^t) + eps, or eps inside the root (Fixing 1-bit Adam, eq. 2; 1-bit LAMB, eq. 2)."""
    if EPS_INSIDE_SQRT:
        return tl.sqrt_rn(v * of(k, RSQRT_BIAS2) * of(k, RSQRT_BIAS2) + of(k, EPS))
    else:
        return tl.sqrt_rn(v) * of(k, RSQRT_BIAS2) + of(k, EPS)


@rule
def preconditioned(x, v, k, EPS_INSIDE_SQRT: tl.constexpr):
    """x / denominator: what moves a parameter, up to the step size (Adam; 1-bit Adam, line 13)."""
    return tl.div_rn(x, denominator(v, k, EPS_INSIDE_SQRT))


@rule
def plain_scale(scale, k):
    """|m| from the scale of unit*m, as it was compressed (1-bit LAMB, section 4.3)."""
    return tl.div_rn(scale, of(k, UNIT))


@rule
def momentum(m, g, k):
    """m_t = beta1 * m_{t-1} + (1 - beta1) * g_t."""
    return m * of(k, BETA1) + g * of(k, ONE_MINUS_BETA1)


@rule
def variance(v, g, k):
    """v_t = beta2 * v_{t-1} + (1 - beta2) * g_t^2."""
    return v * of(k, BETA2) + g * of(k, ONE_MINUS_BETA2) * g


@rule
def followed(v, g, k):
    """v_t of a worker's own gradient; v_{t-1} where that is too large to count."""
    new = variance(v, counted(g, k), k)
    return tl.where(finite(new), new, v)


@rule
def renewed(mean_sq, factor, usual, least):
    """v: the mean of workers' squares, brought to the mean gradient's level; the tensor's mean where there are none.

    All are 0 of a tensor that waits for its first gradient, and so is v.
    """
    return tl.maximum(tl.where(mean_sq > 0, mean_sq * factor, usual), least)


@rule
def in_unit(x, v, old, new):
    """Return what was divided by the denominator of v, as the next one would have divided it; what had no v stays."""
    return tl.where(v > 0, x * tl.div_rn(old, new), x)


@rule
def shared_or_own(v, own):
    """v; the worker's own where there is none yet."""
    return tl.where(v > 0, v, own)


@rule
def moved(x, update, k):
    """x_t = (1 - lr * wd) * x_{t-1} - step_size * update (AdamW; 1-bit Adam, line 13)."""
    return x * of(k, DECAY) - update * of(k, STEP_SIZE)


# ---------------------------------------------------------------- 1-bit Adam (Tang et al., 2021)


@rule
def carried(m, c, s, k, TERNARY: tl.constexpr):
    """beta1 * m_{t-1} + e: what is compressed (line 7), but for the gradient."""
    return m * of(k, BETA1) + residual(c, s, TERNARY)


@rule
def gradient_share(g, k):
    """(1 - beta1) * g_t, of which line 6 makes the momentum; none where the gradient is too large to count."""
    return counted(g, k) * of(k, ONE_MINUS_BETA1)


@rule
def with_gradient(kept, g, k):
    """c = unit * (1 - beta1) * g_t + kept: one scale then suits all layers (1-bit LAMB, section 4.3)."""
    return gradient_share(g, k) * of(k, UNIT) + kept


@rule
def with_preconditioned(kept, g, v, k, EPS_INSIDE_SQRT: tl.constexpr):
    """c, where the unit of each coordinate is that of its layer over its denominator."""
    share = of(k, ONE_MINUS_BETA1) * of(k, UNIT)  # once for a block
    return preconditioned(counted(g, k) * share, v, k, EPS_INSIDE_SQRT) + kept


# ---------------------------------------------------------------- LAMB and 1-bit LAMB (Li et al., 2021)


@rule
def unbiased(m, k):
    """m / (1 - beta1^t)."""
    return m * of(k, UNBIAS1)


@rule
def decaying(update, x, k):
    """update + wd * x."""
    return update + x * of(k, WEIGHT_DECAY)


@rule
def lamb(x, m, v, k, EPS_INSIDE_SQRT: tl.constexpr):
    """u_t = m / denominator + wd * x (eq. 2, line 3)."""
    return decaying(preconditioned(unbiased(m, k), v, k, EPS_INSIDE_SQRT), x, k)


@rule
def rebuilt_gradient(m, last, k):
    """g_t = (m_t - beta1 * m_{t-1}) / (1 - beta1) (Algorithm 1, line 15)."""
    return tl.div_rn(m - last * of(k, BETA1), of(k, ONE_MINUS_BETA1))


@rule
def coefficient(x: float, u: float, k) -> float:
    """c_t = clip(|x|/|u|, c_min, c_max), or 1 where a norm is zero (eq. 2, line 4); float64."""
    c = tl.minimum(tl.maximum(x / u, of(k, C_MIN).to(tl.float64)), of(k, C_MAX).to(tl.float64))
    return tl.where((x > 0) & (u > 0), c, 1.0)


@rule
def average(c_avg, c, k, SKIPS_ONES: tl.constexpr):
    """c_avg = beta3 * c_avg + (1 - beta3) * c (Algorithm 1, line 2), or c_avg where SKIPS_ONES and c == 1; float64."""
    beta3 = of(k, BETA3).to(tl.float64)
    moved = beta3 * c_avg + (1.0 - beta3) * c
    if SKIPS_ONES:
        moved = tl.where(c == 1.0, c_avg, moved)
    return moved


@rule
def variance_ratio(frozen, v, k, EPS_INSIDE_SQRT: tl.constexpr, OF_DENOMINATORS: tl.constexpr):
    """v_{T_w} / v_t (Algorithm 1, line 17), or the ratio of their denominators; 0 where it is 0/0 or inf/inf."""
    if OF_DENOMINATORS:
        frozen = denominator(frozen, k, EPS_INSIDE_SQRT)
        v = denominator(v, k, EPS_INSIDE_SQRT)
    ratio = tl.div_rn(frozen, v)
    return tl.where(ratio >= 0, ratio, 0.0)


@rule
def blended(r: float, adam: float, u: float) -> float:
    """R*r + 1 - R, R = min(1, |m/denom|/|u|): weight decay's share of the update keeps its coefficient; float64."""
    share = tl.where(adam < u, adam / u, 1.0)
    return r * share + (1.0 - share)


@rule
def limited(r: float, last: float, k, RANGE_FIRST: tl.constexpr) -> float:
    """r, near the last one (Algorithm 1, line 18), then in its range (line 19), or the other way round; float64."""
    low = of(k, R_MIN).to(tl.float64)
    high = of(k, R_MAX).to(tl.float64)
    threshold = of(k, R_THRESHOLD).to(tl.float64)
    if RANGE_FIRST:
        r = tl.minimum(tl.maximum(r, low), high)
    r = tl.minimum(tl.maximum(r, last * (1.0 - threshold)), last * (1.0 + threshold))
    if not RANGE_FIRST:
        r = tl.minimum(tl.maximum(r, low), high)
    return r


@rule
def rescaled(r: float, found: float, last: float, c_avg: float):
    """r_t, the last one in a layer that found no ratio, and c_t = r_t * c_avg (line 20); float64, r in float32."""
    kept = tl.where(found > 0, r, last).to(tl.float32)
    return kept, kept.to(tl.float64) * c_avg


@rule
def norm_without_noise(squares: float, k) -> float:
    """|u|^2, from that of the bits which stand for unit * m, with the noise of compression; float64."""
    unbias = of(k, UNBIAS1).to(tl.float64)
    unit = of(k, UNIT).to(tl.float64)
    share = unbias * SHARE_OF_NORM / unit
    return squares * share * share


@rule
def followed_norm(last: float, now: float, k) -> float:
    """Return the moving average of |u|^2, by beta3; of a step in which nothing moves the last one; float64."""
    beta3 = of(k, BETA3).to(tl.float64)
    moved = tl.where(last > 0, beta3 * last + (1.0 - beta3) * now, now)
    return tl.where(now > 0, moved, last)


@rule
def decaying_coefficient(x: float, squares: float, k) -> float:
    """c, of |x| and of |u|^2 without wd * x, which counts as if it were at right angles; more than 0; float64."""
    decay = of(k, WEIGHT_DECAY).to(tl.float64)
    decay = decay * x
    c = coefficient(x, tl.sqrt(squares + decay * decay), k)
    return tl.where(c > LEAST_UNIT, c, LEAST_UNIT)


@rule
def layer_step(c: float, k):
    """Make the columns STEP_SIZE, DECAY that move a layer's parameters by its coefficient; float64, rounded once."""
    step = of(k, LR).to(tl.float64) * c
    step_size = (step * of(k, UNBIAS1).to(tl.float64)).to(tl.float32)
    decay = (1.0 - step * of(k, WEIGHT_DECAY).to(tl.float64)).to(tl.float32)
    return step_size, decay


@rule
def following_step(most: float, following: float, k):
    """``layer_step`` of the smaller of c_t and ``most``, for bits in the unit c_t, where UNIT is already c_{t+1}."""
    unit = of(k, UNIT).to(tl.float64)
    step = of(k, LR).to(tl.float64)
    step = step * tl.minimum(unit, most)
    unbias = of(k, UNBIAS1).to(tl.float64)
    weight_decay = of(k, WEIGHT_DECAY).to(tl.float64)
    return (step * unbias * following / unit).to(tl.float32), (1.0 - step * weight_decay).to(tl.float32)


# ---------------------------------------------------------------- scales


@rule
def scale_of(absolute: float, squares: float, n: float, NORM: tl.constexpr):
    """Make the scale of n elements with these sums; none of none.

    l1, l2, min(l2, 1.9 * l1) or min(1.3 * l2, 1.9 * l1): what is below 2 * l1 contracts.
    """
    least = tl.where(n >= 1, n, 1.0)
    l1 = absolute / least
    l2 = tl.sqrt(squares / least)
    if NORM == 0:
        return l1.to(tl.float32)
    elif NORM == 1:
        return l2.to(tl.float32)
    elif NORM == 2:
        return tl.minimum(l2, 1.9 * l1).to(tl.float32)
    else:
        return tl.minimum(1.3 * l2, 1.9 * l1).to(tl.float32)


@rule
def residual_square(absolute: float, squares: float, s, n: float) -> float:
    """Form |e|^2 of n elements with these sums and the scale s, as |c|^2 - s*(2*|c|_1 - s*n), without an element."""
    wide = s.to(tl.float64)
    return squares - wide * (absolute * 2.0 - wide * n)


# ---------------------------------------------------------------- distributed Lion (Liu et al., 2024, Algorithm 1)


@rule
def lion(m, g, k):
    """c_t = beta1 * m_{t-1} + (1 - beta1) * g_t, whose sign is sent; m_t = beta2 * m_{t-1} + (1 - beta2) * g_t."""
    c = m * of(k, BETA1) + g * of(k, ONE_MINUS_BETA1)
    m = m * of(k, BETA2) + g * of(k, ONE_MINUS_BETA2)
    return c, m


@rule
def untied(c, bits: int):
    """c, or -1 where it is 0 and the lowest random bit is 0: a vote has no zero, and 0 is taken for positive."""
    return tl.where((c == 0) & ((bits & 1) == 0), -1.0, c)


# ---------------------------------------------------------------- Marsit (Wu et al., DAC 2022)


@rule
def compensation(c, sent, limit):
    """Bound what compression has left (Algorithm 1, line 10); the paper's limit is infinity."""
    e = c - sent
    e = tl.where(e < negative(limit), negative(limit), e)  # a NaN stays one
    e = tl.where(e > limit, limit, e)
    return e + 0.0  # no -0.0, whatever the backend makes of bounds that are zero


@rule
def global_step(k, steps, most):
    """eta_s of a round of so many steps (Algorithm 2), and ``most`` times it, which bounds what is left if it moves."""
    s = of(k, LR) * of(k, GLOBAL_RATIO) * steps
    return s, tl.where(s > 0, s * most, INFINITY)


@rule
def accumulated(m, d, k):
    """m_t = momentum * m_{t-1} + d."""
    return m * of(k, BETA1) + d


@rule
def step_of(update, k):
    """step_size * update."""
    return update * of(k, STEP_SIZE)


@rule
def decoupled(u, x, k):
    """u + lr * wd * x."""
    return u + x * (of(k, LR) * of(k, WEIGHT_DECAY))


# ---------------------------------------------------------------- 0/1 Adam (Lu et al., 2022, Algorithm 1)


@rule
def quotient(m, d):
    """m / d, 0 where d is: without eps, what never had a gradient."""
    return tl.where(d > 0, tl.div_rn(m, d), 0.0)


@rule
def owed(c, update, k):
    """Return what a worker's own steps add up to, in units of parameters, with which it decays: so x0 - c is x."""
    return c * of(k, DECAY) + update * of(k, STEP_SIZE)


@rule
def with_decay(added, x, d, k):
    """Add a step's weight decay to what it adds to the buffer, in the unit of momentum: wd * x * denominator."""
    return added + x * of(k, WEIGHT_DECAY) * d
