"""Merges against float64 sums; what bfloat16 and ternary rounding leave of them."""

import numpy as np
import pytest

from bitmamba.lora.merge import base_of, merge_float, merge_ternary, total_change
from bitmamba.paths import flatten, unflatten
from bitmamba.quant.ternary import latent_from_codes, ternarise
from bitmamba.types import AdapterSpec

D, F, R = 24, 20, 3
SITE = "layer_0/mixer/in_proj"
KERNEL = f"{SITE}/kernel"


def spec(*, name="", start=0, width=F, scale=0.75, magnitude=False, site=SITE):
    path = f"{site}/{name}" if name else site
    return AdapterSpec(path, site, (D, width), start, R, scale, 0.0, magnitude)


def make_tree(specs, *, size=1.0, kernel=None, seed=0):
    """A kernel and random adapters."""
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((D, F)) if kernel is None else kernel
    flat = {KERNEL: kernel, "layer_0/norm/scale": np.ones(D)}
    for one in specs:
        flat[f"{one.path}/a"] = size * rng.standard_normal((one.shape[0], R))
        flat[f"{one.path}/b"] = rng.standard_normal((R, one.shape[1]))
        if one.magnitude:
            flat[f"{one.path}/magnitude"] = 1 + rng.random(one.shape[1])
    return unflatten({p: np.asarray(v, np.float32) for p, v in flat.items()})


def merged64(tree, specs):
    """The float64 sum, column by column."""
    flat = {p: np.float64(v) for p, v in flatten(tree).items()}
    kernel = flat[KERNEL].copy()
    for one in specs:
        for column in range(one.shape[1]):
            delta = flat[f"{one.path}/a"] @ flat[f"{one.path}/b"][:, column]
            total = flat[KERNEL][:, one.start + column] + one.scale * delta
            if one.magnitude:
                length = flat[f"{one.path}/magnitude"][column]
                total = total * length / np.sqrt((total * total).sum())
            kernel[:, one.start + column] = total
    return kernel


def to_bfloat16(x):
    """float32 rounded to the upper 16 bits, to even at ties, as float32."""
    bits = x.view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def ternary(tree, specs):
    return merge_ternary(
        tree,
        specs,
        is_ternary=lambda path: path.endswith("/kernel"),
        ternarise=ternarise,
        latent=latent_from_codes,
    )


@pytest.mark.parametrize("magnitude", [False, True], ids=["plain", "dora"])
def test_slices_are_added_on_their_columns_and_nowhere_else(magnitude):
    specs = [
        spec(name="x", start=4, width=6, scale=0.75, magnitude=magnitude),
        spec(name="dt", start=15, width=5, scale=2.0, magnitude=magnitude),
    ]
    tree = make_tree(specs)

    merged, rows = merge_float(tree, specs)

    flat = flatten(merged)
    assert list(flat) == [KERNEL, "layer_0/norm/scale"]
    assert flat[KERNEL].dtype == np.float32
    expected = merged64(tree, specs)
    np.testing.assert_allclose(flat[KERNEL], expected, rtol=0, atol=3e-6)
    for free in (slice(0, 4), slice(10, 15)):
        before = flatten(tree)[KERNEL][:, free]
        np.testing.assert_array_equal(flat[KERNEL][:, free], before)
    assert [row.site for row in rows] == [SITE]
    assert rows[0].n_weights == D * 11


def test_adapters_of_embedding_and_head_are_merged_into_them():
    embed = AdapterSpec("embed", "embed", (10, D), 0, R, 0.5)
    head = AdapterSpec("lm_head", "lm_head", (D, 10), 0, R, 2.0)
    rng = np.random.default_rng(0)
    shapes = {"embed/embedding": (10, D), "embed/a": (10, R), "embed/b": (R, D)}
    shapes |= {"lm_head/kernel": (D, 10), "lm_head/a": (D, R), "lm_head/b": (R, 10)}
    flat = {p: np.float32(rng.standard_normal(s)) for p, s in shapes.items()}

    merged = flatten(merge_float(unflatten(flat), [embed, head])[0])

    wide = {p: np.float64(v) for p, v in flat.items()}
    cases = [("embed/embedding", "embed", 0.5), ("lm_head/kernel", "lm_head", 2.0)]
    for leaf, site, scale in cases:
        expected = wide[leaf] + scale * wide[f"{site}/a"] @ wide[f"{site}/b"]
        np.testing.assert_allclose(merged[leaf], expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("relative", "unchanged"), [(8e-5, 0.98), (8e-4, 0.82), (8e-3, 0.22)]
)
def test_report_says_how_much_of_a_small_change_bfloat16_would_lose(
    relative, unchanged
):
    """B089: the shares that were seen for a base in bfloat16."""
    rng = np.random.default_rng(0)
    wide = AdapterSpec(SITE, SITE, (256, 256), 0, 8, 1.0)
    a, b = rng.standard_normal((256, 8)), rng.standard_normal((8, 256))
    kernel = to_bfloat16(rng.standard_normal((256, 256)).astype(np.float32))
    a *= relative * np.linalg.norm(kernel) / np.linalg.norm(a @ b)
    flat = {KERNEL: kernel, f"{SITE}/a": np.float32(a), f"{SITE}/b": np.float32(b)}

    merged, (row,) = merge_float(unflatten(flat), [wide])

    exact = np.float64(kernel) + np.float64(flat[f"{SITE}/a"]) @ flat[f"{SITE}/b"]
    np.testing.assert_allclose(flatten(merged)[KERNEL], exact, rtol=0, atol=1e-6)
    assert row.relative == pytest.approx(relative, rel=1e-3)
    assert row.unchanged == pytest.approx(unchanged, abs=0.02)
    delta = exact - kernel
    kept = np.float64(to_bfloat16(np.float32(exact))) - kernel
    lost = np.linalg.norm(kept - delta) / np.linalg.norm(delta)
    assert row.lost == pytest.approx(lost, rel=0.01)
    assert total_change([row])[1:] == pytest.approx(row[1:])


def test_no_change_loses_nothing():
    specs = [spec()]
    tree = make_tree(specs, size=0.0)

    merged, (row,) = merge_float(tree, specs)

    np.testing.assert_array_equal(flatten(merged)[KERNEL], flatten(tree)[KERNEL])
    assert (row.relative, row.unchanged, row.lost) == (0.0, 1.0, 0.0)


def test_ternary_merge_is_the_nearest_at_the_base_scale():
    specs = [spec(scale=0.4)]
    tree = make_tree(specs)
    codes, scale = (np.float64(part) for part in ternarise(flatten(tree)[KERNEL]))

    merged, (row,) = ternary(tree, specs)

    value = codes * scale
    flat = {p: np.float64(v) for p, v in flatten(tree).items()}
    wanted = value + 0.4 * flat[f"{SITE}/a"] @ flat[f"{SITE}/b"]
    nearest = np.abs(wanted[..., None] - scale * np.array([-1, 0, 1])).argmin(-1) - 1
    best_scale = (wanted * nearest).sum() / np.count_nonzero(nearest)
    new_codes, new_scale = ternarise(flatten(merged)[KERNEL])
    np.testing.assert_array_equal(new_codes, nearest)
    np.testing.assert_allclose(new_scale, best_scale, rtol=1e-5)
    assert row.n_changed == np.count_nonzero(nearest != codes) > 0
    assert row.n_weights == D * F
    assert row.scale_ratio == pytest.approx(best_scale / scale, rel=1e-5)
    change = np.linalg.norm(wanted - value)
    error = np.linalg.norm(best_scale * nearest - wanted)
    assert row.lost == pytest.approx(error / change, rel=1e-4)
    assert row.relative == pytest.approx(change / np.linalg.norm(value), rel=1e-4)


def test_a_weight_without_a_changed_code_stays_as_it_was():
    quiet = "layer_1/mixer/out_proj"
    loud = [spec(scale=0.4)]
    flat = flatten(make_tree(loud))
    rng = np.random.default_rng(1)
    flat[f"{quiet}/kernel"] = np.float32(rng.standard_normal((D, F)))
    flat[f"{quiet}/a"] = np.full((D, R), 1e-4, np.float32)
    flat[f"{quiet}/b"] = np.ones((R, F), np.float32)

    merged, rows = ternary(unflatten(flat), [*loud, spec(site=quiet)])

    assert [row.n_changed > 0 for row in rows] == [True, False]
    assert rows[1].scale_ratio == 1.0
    assert rows[1].lost == pytest.approx(1.0)
    after = flatten(merged)[f"{quiet}/kernel"]
    assert after.tobytes() == flat[f"{quiet}/kernel"].tobytes()


def test_a_change_too_small_for_any_code_is_not_called_a_merge():
    """B090: |ΔW| / |W| = 8e-3 beside a ternary weight."""
    specs = [spec()]
    tree = make_tree(specs, size=1e-3)

    with pytest.raises(ValueError, match=r"0 of 480 codes change.*--as=merged"):
        ternary(tree, specs)


def test_adapters_beside_float_weights_alone_merge_into_a_ternary_model():
    specs = [spec()]
    tree = make_tree(specs, size=1e-3)

    merged, rows = merge_ternary(
        tree,
        specs,
        is_ternary=lambda path: False,
        ternarise=ternarise,
        latent=latent_from_codes,
    )

    assert rows == []
    expected = merged64(tree, specs)
    np.testing.assert_allclose(flatten(merged)[KERNEL], expected, rtol=0, atol=3e-6)


def test_a_state_offset_is_refused():
    specs = [spec()]
    flat = flatten(make_tree(specs))
    flat["layer_0/mixer/state_offset"] = np.zeros((2, 3, 4), np.float32)

    for merge in (merge_float, ternary):
        with pytest.raises(ValueError, match=r"layer_0/mixer/state_offset.*no weight"):
            merge(unflatten(flat), specs)


def test_base_of_keeps_every_leaf_that_is_no_adapter_bit_for_bit():
    specs = [spec(magnitude=True)]
    tree = make_tree(specs)

    base = flatten(base_of(tree))

    assert list(base) == [KERNEL, "layer_0/norm/scale"]
    assert all(leaf is flatten(tree)[path] for path, leaf in base.items())
