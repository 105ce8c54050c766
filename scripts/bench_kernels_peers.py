"""The scan by other libraries, where they are installed; in their own arithmetic.

Each entry: inputs -> (forward, forward and backward), functions without arguments that
return milliseconds. Written from the libraries' documentation: none of them was at hand
when this was written, so a peer that fails is shown with its error.
"""

import statistics
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from kernel_timing import REPEATS, median_ms

Timers = tuple[Callable[[], float], Callable[[], float]]


def mamba_ssm(inputs) -> Timers:
    """mamba_ssm's Triton kernels (Dao & Gu)."""
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    t = _torch(torch, inputs)
    ids = t.pop("segment_ids", None)

    def run():
        return mamba_chunk_scan_combined(
            *(t[k] for k in ("x", "dt", "A", "B", "C")),
            chunk_size=256,
            D=t["D"],
            initial_states=t["initial_state"],
            seq_idx=ids,
        )

    return _torch_timers(torch, run, [v for v in t.values() if v is not None])


def fla(inputs) -> Timers:
    """flash-linear-attention's simple_gla: q = C, k = B, v = dt·x, g = dt·A."""
    import torch
    from fla.ops.simple_gla import chunk_simple_gla

    t = _torch(torch, inputs)
    if t["segment_ids"] is not None:
        raise NotImplementedError("documents are given by cu_seqlens, one row only")
    heads, groups = t["x"].shape[2], t["B"].shape[2]
    q, k = (t[n].repeat_interleave(heads // groups, 2).detach() for n in ("C", "B"))
    v = (t["x"] * t["dt"][..., None].to(t["x"].dtype)).detach()
    g = (t["dt"] * t["A"]).detach()
    own = [a.requires_grad_() for a in (q, k, v, g)]

    def run():
        return chunk_simple_gla(q=q, k=k, v=v, g=g, scale=1.0)[0]

    return _torch_timers(torch, run, own)


def jla(inputs) -> Timers:
    """jax-linear-attention's simple_gla, on Hopper GPUs."""
    import jax
    from jla.ops import linear_attention

    heads, groups = inputs["x"].shape[2], inputs["B"].shape[2]
    k, q = (jnp.repeat(inputs[n], heads // groups, 2) for n in ("B", "C"))
    dt = inputs["dt"]
    v = (inputs["x"] * dt[..., None]).astype(inputs["x"].dtype)
    ids = inputs["segment_ids"]

    def run(q, k, v, g):
        return linear_attention("simple_gla", q, k, v, g=g, segment_ids=ids)

    def both(*own):
        y, pull = jax.vjp(lambda *a: jax.tree.leaves(run(*a))[0], *own)
        return pull(y)

    own = (q, k, v, dt * inputs["A"])
    return tuple(lambda f=jax.jit(f): median_ms(f, *own)[0] for f in (run, both))


PEERS = {"mamba_ssm (Triton)": mamba_ssm, "fla (Triton)": fla, "jla": jla}


def _torch(torch, inputs):
    """The inputs on the GPU; what is float takes part in the gradient."""
    made = {}
    for name, value in inputs.items():
        if value is None:
            made[name] = None
            continue
        dtype = torch.bfloat16 if value.dtype == jnp.bfloat16 else None
        wide = np.asarray(value, np.float32) if dtype else np.asarray(value)
        tensor = torch.from_numpy(np.array(wide)).to("cuda", dtype)
        made[name] = tensor.requires_grad_(tensor.is_floating_point())
    return made


def _torch_timers(torch, run, own) -> Timers:
    def timed(call):
        def median():
            for _ in range(3):
                call()
            taken = []
            for _ in range(REPEATS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                taken.append(start.elapsed_time(end))
            return statistics.median(taken)

        return median

    def forward():
        with torch.no_grad():
            run()

    def both():
        y = run()
        torch.autograd.grad(y, own, torch.ones_like(y), allow_unused=True)

    return timed(forward), timed(both)
