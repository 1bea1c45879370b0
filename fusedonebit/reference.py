"""1-bit Adam, 1-bit LAMB and Marsit as their papers print them: plain torch, on simulated workers.

    1-bit Adam   Tang et al., ICML 2021   Algorithm 1           adam, then onebit_adam
    1-bit LAMB   Li et al., 2021          Algorithm 1           lamb, freeze, then onebit_lamb
    Marsit       Wu et al., DAC 2022      Algorithms 1 and 2    marsit_sgd, which calls marsit

and both of the first with a variance that lives, which is no paper's: live once, then living_adam, and renew at times;
after lamb live_lamb, then living_lamb, and renew. No paper's either is 0/1 Adam whose workers have variances of their
own: own_adam in each step, and synchronise after some of them.

Each function is one step, in the paper's order and symbols; behind a line of code stands the number of the algorithm's
line (for 1-bit Adam that of 1-bit LAMB, whose lines 6 to 13 repeat it). Workers are rows: what each of W workers has of
its own is a tensor [W, d], what all have alike is a tensor [d]. Nothing here is fast, communicates or looks for errors.
The optimizers do, and their tests compare them with this file in float64.

    state = State(x, workers=4)
    for t in range(1000):
        g = torch.stack([gradient(state.x, batch) for batch in batches(t)])
        step = adam if t < 200 else onebit_adam
        step(state, g, gamma=1e-3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, inf
from torch.linalg import vector_norm as norm

# The numbers of lines stand in a column:
# fmt: off


def compress(c: Tensor, p: float = 1) -> Tensor:
    """C_omega: the signs of each row, times the scale that gives them the row's p-norm."""
    sign = torch.where(c >= 0, 1.0, -1.0).to(c)
    return norm(c, p, -1, keepdim=True) / norm(sign, p, -1, keepdim=True) * sign

# ---------------------------------------------------------------- 1-bit Adam

class State:
    """What 1-bit Adam carries from step to step."""
    def __init__(self, x: Tensor, workers: int) -> None:             # line 1
        self.x = x.clone()                                           # [d] the model
        self.m = torch.zeros_like(x)                                 # [d] the momentum
        self.v = torch.zeros_like(x)                                 # [d] the variance; once frozen, v_{T_w}
        self.worker_error = x.new_zeros(workers, len(x))             # [W, d] delta
        self.server_error = torch.zeros_like(x)                      # [d] bar delta
        self.C: Callable[[Tensor], Tensor] = compress
        self.servers: int | Sequence[int] = 1                        # into how many chunks, or where, m is cut


def adam(s: State, g: Tensor, *, gamma: float, beta1: float = 0.9, beta2: float = 0.999, eta: float = 1e-8) -> None:
    """Warm-up: Adam on the mean of the workers' gradients g [W, d]."""
    g = g.mean(0)                                                    # line 2
    s.m = beta1 * s.m + (1 - beta1) * g
    s.v = beta2 * s.v + (1 - beta2) * g**2
    s.x = s.x - gamma * s.m / (s.v.sqrt() + eta)


def onebit_adam(s: State, g: Tensor, *, gamma: float, beta1: float = 0.9, eta: float = 1e-8) -> None:
    """Compression stage: momentum SGD, preconditioned with the variance of the warm-up."""
    s.m = exchange(s, s.m, g, beta1)                                 # lines 6 to 13
    s.x = s.x - gamma * s.m / (s.v.sqrt() + eta)                     # line 13


def exchange(s: State, m: Tensor, g: Tensor, beta1: float) -> Tensor:
    """Average the workers' momenta at one bit per element, with error feedback on both sides."""
    m_i = beta1 * m + (1 - beta1) * g                                # line 6, on the workers
    m_hat = s.C(m_i + s.worker_error)                                # line 7
    s.worker_error = m_i + s.worker_error - m_hat                    # line 7; line 8 sends m_hat
    average = m_hat.mean(0) + s.server_error                         # line 10, on the servers, a chunk on each
    m_bar = torch.cat([s.C(chunk) for chunk in average.tensor_split(s.servers)])
    s.server_error = average - m_bar                                 # line 10; line 11 sends m_bar
    return m_bar                                                     # line 13, on the workers

# ---------------------------------------------------------------- 1-bit Adam with a variance that lives

class LivingState(State):
    """What it carries besides; layers are slices of the model. m and both errors are in units of the update."""
    def __init__(self, x: Tensor, workers: int, layers: Sequence[slice]) -> None:
        super().__init__(x, workers)
        self.layers, self.s = layers, x.new_zeros(workers, len(x))   # the EMA of each worker's own squares
        self.level, self.weight = x.new_zeros(len(layers)), 0.0      # that of |mean g|^2, and its weights' sum


def live(s: LivingState, t: int, *, beta2: float = 0.999, eta: float = 1e-8, floor: float = 0.125) -> None:
    """End of a warm-up of t steps: all workers go on from its variance, which is brought to a mean's scale."""
    s.s[:] = s.v
    s.level = torch.stack([s.v[l].sum() for l in s.layers])
    s.weight = 1 - beta2**t
    s.v = torch.cat([floored(s.v[l] / s.weight, floor) for l in s.layers])
    s.m = s.m / (s.v.sqrt() + eta)


def floored(v: Tensor, floor: float) -> Tensor:
    """v, which has a share of its mean at least, and that mean where it is 0."""
    mean = v[v > 0].mean()
    return torch.where(v > 0, v, mean).clamp(min=floor * mean)


def living_adam(s: LivingState, g: Tensor, *, gamma: float, beta1: float = 0.9, beta2: float = 0.999, eta: float = 1e-8
                ) -> None:
    """Compression stage: the workers' own squares are followed; the update itself is what is compressed."""
    s.s = beta2 * s.s + (1 - beta2) * g**2
    s.m = exchange(s, s.m, g / (s.v.sqrt() + eta), beta1)
    s.x = s.x - gamma * s.m


def renew(s: LivingState, g: Tensor, r: Tensor, since: int, shares: Sequence[int], *, beta2: float = 0.999,
          eta: float = 1e-8, floor: float = 0.0, block: int = 4096) -> None:
    """After a step on the gradients g [W, d]: v anew, from random signs r [d], alike on all workers.

    since: Steps since the last time. shares: Of how many elements of a layer one projection is the sum. block: Elements
    of which each worker tells how large squares are where there is a gradient.
    """
    b = beta2**since
    s.level, s.weight = b * s.level + (1 - b) * projected(s.layers, g, r, shares), b * s.weight + 1 - b
    mean = logarithm(logarithm(s.s).mean(0))                         # sent to servers, and back
    level = [s.level[k] / s.weight / mean[l].sum() for k, l in enumerate(s.layers)]
    least = [max(floor, least_share(g[:, l], s.s[:, l], (1 - beta2) / s.weight, block)) for l in s.layers]
    v = torch.cat([floored(level[k] * mean[l], least[k]) for k, l in enumerate(s.layers)])
    unit = (s.v.sqrt() + eta) / (v.sqrt() + eta)
    s.v, s.m, s.worker_error, s.server_error = v, unit * s.m, unit * s.worker_error, unit * s.server_error


def least_share(g: Tensor, s: Tensor, entering: float, block: int) -> float:
    """What one gradient of the usual size makes of Adam's v, of an element that has had none: ``entering`` g^2."""
    q, s = ((x if len(x[0]) < block else x.unflatten(1, (-1, block))) for x in (g**2, s))
    peak, met = (((q * x).sum(-1) / q.sum(-1)).nan_to_num() for x in (q, s))   # 0 of a block without a gradient
    return min(1.0, entering * float(peak.sum() / met.sum())) if met.any() else 0.125


def projected(layers: Sequence[slice], g: Tensor, r: Tensor, shares: Sequence[int]) -> Tensor:
    """|mean g|^2 of each layer, on average: the squares of the mean gradient's projections on random signs."""
    p = [(r * g)[:, l].unflatten(1, (-1, share)).sum(2).mean(0) for l, share in zip(layers, shares, strict=True)]
    return torch.stack([of_layer.square().sum() for of_layer in p])      # E p^2 = |mean g|^2, of as many elements


def logarithm(x: Tensor) -> Tensor:
    """x as 8 bits tell it: eight steps to an octave."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((16 * mantissa + 0.5).floor() / 16, exponent)

# ---------------------------------------------------------------- 0/1 Adam whose workers have variances of their own

class OwnState(State):
    """What it carries besides; layers are slices of the model. Both errors are in units of parameters."""
    def __init__(self, x: Tensor, workers: int, layers: Sequence[slice]) -> None:
        super().__init__(x, workers)
        self.x_i = x.repeat(workers, 1)                              # [W, d] where each worker is; x: where all were
        self.m, self.v = torch.zeros_like(self.x_i), torch.zeros_like(self.x_i)
        self.layers, self.t, self.last, self.left = layers, 0, 0, 1.0    # steps; and what decay leaves of x in a round
        self.level, self.weight = x.new_zeros(len(layers)), 0.0      # the EMA of |mean g|^2, and its weights' sum
        self.rho = x.new_ones(len(layers))                           # that over the workers' own |g|^2


def own_adam(s: OwnState, g: Tensor, *, gamma: float, decay: float = 0.0, beta1: float = 0.9, beta2: float = 0.999,
             eta: float = 1e-8) -> None:
    """A step between two synchronisations: each worker's own AdamW, whose variance is brought to the mean's level."""
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * g
    s.v = beta2 * s.v + (1 - beta2) * g**2
    rho = torch.cat([s.rho[k].expand(len(s.x[l])) for k, l in enumerate(s.layers)])
    u = s.m / (1 - beta1**s.t) / ((rho * s.v / (1 - beta2**s.t)).sqrt() + eta)
    s.x_i = (1 - gamma * decay) * s.x_i - gamma * u
    s.worker_error = (1 - gamma * decay) * s.worker_error + gamma * u    # x without what is owed to it is AdamW's
    s.left = (1 - gamma * decay) * s.left


def synchronise(s: OwnState) -> None:
    """After a round's last step: the mean of what workers add up, and nothing else, moves x."""
    nothing = torch.zeros_like(s.x)
    s.x = s.left * s.x - exchange(s, nothing, nothing, 0.0)
    s.x_i, s.left = s.x.repeat(len(s.x_i), 1), 1.0


def follow(s: OwnState, g: Tensor, r: Tensor, shares: Sequence[int], *, beta2: float = 0.999) -> None:
    """Then, in some rounds, what they tell of the last step's g [W, d]; r [d] and shares are as for renew."""
    b, s.last = beta2 ** (s.t - s.last), s.t
    s.level, s.weight = b * s.level + (1 - b) * projected(s.layers, g, r, shares), b * s.weight + 1 - b
    own = torch.stack([s.v[:, l].mean(0).sum() for l in s.layers]) / (1 - beta2**s.t)
    s.rho = (s.level / s.weight / own).clip(1 / len(g), 1)

# ---------------------------------------------------------------- 1-bit LAMB

class LambState(State):
    """What 1-bit LAMB carries besides; layers are slices of the model."""
    def __init__(self, x: Tensor, workers: int, layers: Sequence[slice]) -> None:
        super().__init__(x, workers)                                 # line 1
        self.layers, self.c_avg, self.r = layers, x.new_zeros(len(layers)), x.new_ones(len(layers))
        self.c = x.new_zeros(len(layers))                            # of the last step of the warm-up
        self.v_frozen, self.scale = torch.zeros_like(x), torch.ones_like(x)


def lamb(s: LambState, g: Tensor, *, gamma: float, beta1: float = 0.9, beta2: float = 0.999, beta3: float = 0.9,
         eta: float = 1e-6, c_min: float = 0.01, c_max: float = 10.0) -> None:
    """Warm-up: LAMB on the mean of the workers' gradients g [W, d], and the average of its coefficients."""
    g = g.mean(0)                                                    # line 2, with equation (2)
    for k, l in enumerate(s.layers):
        s.m[l] = beta1 * s.m[l] + (1 - beta1) * g[l]
        s.v[l] = beta2 * s.v[l] + (1 - beta2) * g[l] ** 2
        u = s.m[l] / (s.v[l] + eta).sqrt()
        s.c[k] = (norm(s.x[l]) / norm(u)).clip(c_min, c_max)
        s.x[l] = s.x[l] - gamma * s.c[k] * u
        s.c_avg[k] = beta3 * s.c_avg[k] + (1 - beta3) * s.c[k]


def freeze(s: LambState) -> None:
    """End of the warm-up: store the variance; find the factors that give all layers' momenta the same size."""
    s.v_frozen = s.v.clone()                                         # line 3
    size = torch.stack([s.m[l].square().mean().sqrt() for l in s.layers])
    for k, l in enumerate(s.layers):
        s.scale[l] = size.mean() / size[k]                           # section 4.3


def onebit_lamb(s: LambState, g: Tensor, *, gamma: float, beta1: float = 0.9, beta2: float = 0.999, eta: float = 1e-6,
                r_min: float = 0.5, r_max: float = 4.0, r_threshold: float = 0.1) -> None:
    """Compression stage: layers' learning rates follow the variance of gradients rebuilt from the momentum."""
    m_before = s.m
    s.m = exchange(s, s.scale * s.m, s.scale * g, beta1) / s.scale   # lines 6 to 13, with section 4.3
    for k, l in enumerate(s.layers):                                 # line 14
        g_l = (s.m[l] - beta1 * m_before[l]) / (1 - beta1)           # line 15
        s.v[l] = beta2 * s.v[l] + (1 - beta2) * g_l**2               # line 16
        r = norm(s.v_frozen[l] / s.v[l], inf)                        # line 17
        r = r.clip((1 - r_threshold) * s.r[k], (1 + r_threshold) * s.r[k])   # line 18
        s.r[k] = r.clip(r_min, r_max)                                # line 19
        c = s.r[k] * s.c_avg[k]                                      # line 20
        s.x[l] = s.x[l] - gamma * c * s.m[l] / (s.v_frozen[l] + eta).sqrt()  # line 21

# ---------------------------------------------------------------- 1-bit LAMB with a variance that lives

class LivingLambState(LivingState):
    """What it carries besides. m and both errors are in units of the step: each gradient counts times its step's c."""
    def __init__(self, x: Tensor, workers: int, layers: Sequence[slice]) -> None:
        super().__init__(x, workers, layers)
        self.c, self.c_avg = x.new_ones(len(layers)), x.new_zeros(len(layers))
        self.u2 = x.new_zeros(len(layers))                           # the average of |u|^2


def live_lamb(s: LivingLambState, t: int, *, beta2: float = 0.999, eta: float = 1e-6, floor: float = 0.125,
              c_range: tuple[float, float] = (0.01, 10.0)) -> None:
    """End of a warm-up of t steps: as live, and each layer goes on from its last coefficient."""
    u = s.m / (s.v.sqrt() + eta)
    live(s, t, beta2=beta2, eta=eta, floor=floor)
    for k, l in enumerate(s.layers):
        s.m[l] = s.c[k] * s.m[l]
        s.u2[k] = (norm(u[l]) if s.c[k] in c_range else norm(s.x[l]) / s.c[k]) ** 2      # c in its range is |x|/|u|


def living_lamb(s: LivingLambState, g: Tensor, *, gamma: float, beta1: float = 0.9, beta2: float = 0.999,
                beta3: float = 0.9, eta: float = 1e-6, c_min: float = 0.01, c_max: float = 10.0, share: float = 0.4375
                ) -> None:
    """Compression stage: the step itself is what is compressed, and coefficients follow what comes of it."""
    s.s = beta2 * s.s + (1 - beta2) * g**2
    c = torch.cat([s.c[k].expand(len(s.x[l])) for k, l in enumerate(s.layers)])
    s.m = exchange(s, s.m, c * g / (s.v.sqrt() + eta), beta1)
    for k, l in enumerate(s.layers):
        x, u = norm(s.x[l]), share * norm(s.m[l]) / s.c[k]           # of bits' norm so much is the update's
        most = (x / u).clip(c_min, c_max)
        s.x[l] = s.x[l] - gamma * (most / s.c[k]).clip(max=1) * s.m[l]
        s.u2[k] = beta3 * s.u2[k] + (1 - beta3) * u**2
        s.c[k] = (x / s.u2[k].sqrt()).clip(c_min, c_max)

# ---------------------------------------------------------------- 1-bit Muon

class MuonState:
    """What it carries for one matrix [a, b]; where b > a it is the transpose that is compressed, [m, n] with m >= n."""
    def __init__(self, x: Tensor, workers: int) -> None:
        n = min(x.shape)
        self.x, wide = x.clone(), x.shape[1] > x.shape[0]
        like = x.mT if wide else x
        self.worker_error = like.new_zeros(workers, *like.shape)     # [W, m, n], whitened as the momentum is
        self.momentum = torch.zeros_like(like)                       # [m, n], on the matrix's owner
        self.gram = x.new_zeros(n, n)                                # the EMA of the momentum's
        self.white, self.back = torch.eye(n).to(x), torch.eye(n).to(x)   # what whitens, and its inverse


def onebit_muon(shards: Sequence[MuonState], g: Tensor, *, gamma: float, mu: float = 0.95, lead: float = 0.1,
                decay: float = 0.0, ns_steps: int = 5, stacks: int = 1) -> None:
    """Muon on the mean of g [W, a, b]: gradients travel to the owner with error feedback, the update's signs back.

    A matrix that is whole has one state; else of each shard of its rows one, and owners of shards orthogonalise as one.
    """
    directions = []
    for s, own in zip(shards, g.chunk(len(shards), 1), strict=True):
        wide = own.shape[2] > own.shape[1]
        c = s.worker_error + (own.mT if wide else own) @ s.white     # on the workers
        c_hat = outer(c)
        s.worker_error = c - c_hat                                   # c_hat is sent
        d = c_hat.mean(0)                                            # on the owner
        s.momentum = mu * s.momentum + (1 - mu) * d
        direction, raw = (lead * d + (1 - lead) * s.momentum) @ s.back, s.momentum @ s.back
        s.gram = 0.95 * s.gram + 0.05 * raw.mT @ raw
        directions.append(direction.mT if wide else direction)
    each = torch.cat(directions).chunk(stacks)
    u = torch.cat([orthogonal(part, ns_steps) for part in each])
    u = torch.where(u >= 0, 1.0, -1.0).to(u) / max(each[0].shape) ** 0.5     # signs are sent
    for s, own in zip(shards, u.chunk(len(shards)), strict=True):
        s.x = (1 - gamma * decay) * s.x - gamma * own                # on the workers


def whiten(s: MuonState, least: float = 1e-4) -> None:
    """From time to time the owner sends what makes the momentum's columns alike and independent: its gram^-1/2."""
    square, q = torch.linalg.eigh(s.gram)
    root = (square.clamp(min=0) / square.mean() + least).sqrt()
    white, back = q / root @ q.mT, q * root @ q.mT
    turn = s.back @ white
    s.white, s.back, s.momentum, s.worker_error = white, back, s.momentum @ turn, s.worker_error @ turn


def outer(c: Tensor) -> Tensor:
    """C_omega of matrices: signs, times row's and column's mean magnitudes over that of all."""
    size = c.abs()
    scale = size.mean(-1, keepdim=True) * size.mean(-2, keepdim=True) / size.mean((-2, -1), keepdim=True)
    return torch.where(c >= 0, scale, -scale)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz (Jordan, 2024): nearly the orthogonal matrix nearest to x [m, n]."""
    x = x / norm(x).clamp(min=1e-7)
    for _ in range(steps):
        gram = x.mT @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x

# ---------------------------------------------------------------- Marsit

def marsit(g: Tensor, c: Tensor, u: Tensor, *, t: int, K: float, eta_s: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1: the global update g_t [d], and compensations c [W, d]; u [W, d] is uniform in [0, 1)."""
    g, W, signs = g + c, len(g), []                                  # line 1
    parts = torch.arange(g.shape[1]).tensor_split(W)                 # line 2
    if t % K != 0:                                                   # line 3
        for start, part in enumerate(parts):
            v = g[start, part] >= 0                                  # line 5
            for i in range(1, W):                                    # line 4
                m = (start + i) % W                                  # line 7: v goes to the next worker
                v = merge(v, g[m, part] >= 0, u[m, part], i + 1)     # lines 5 and 6
            signs.append(torch.where(v, 1.0, -1.0).to(g))
        g_t = eta_s * torch.cat(signs)                               # line 9
        c = g - g_t                                                  # line 10
    else:
        g_t = g.mean(0)                                              # line 11
        c = torch.zeros_like(g)                                      # line 12
    return g_t, c                                                    # line 14


def merge(v: Tensor, v_star: Tensor, u: Tensor, m: int) -> Tensor:
    """Equation (2): where v and the m-th worker's v_star differ, v_star counts with probability 1/m."""
    transient = u < torch.where(v_star, 1 / m, (m - 1) / m)
    return (v & v_star) | ((v ^ v_star) & transient)


def marsit_sgd(x: Tensor, c: Tensor, g: Tensor, u: Tensor, *, t: int, K: float, eta_l: float, eta_s: float
               ) -> tuple[Tensor, Tensor]:
    """Algorithm 2: the model x [d] and the compensations after a step with the workers' gradients g [W, d]."""
    g_t, c = marsit(eta_l * g, c, u, t=t, K=K, eta_s=eta_s)          # line 5
    return x - g_t, c                                                # line 6
