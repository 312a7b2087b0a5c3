"""Augmentation against torchvision: each operation, the distribution of its draws, and the whole."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import transforms
from torchvision.transforms import functional as classic
from torchvision.transforms.v2 import functional as v2

from aidgn.data import transforms as aug
from aidgn.data.transforms import SHARES, UNIFORMS, augment, clean, crop_boxes, jitter, jitter_factors, resample

SIZE, SLOT = 32, 45
ORDERS = list(itertools.permutations(range(4)))
OPERATIONS = (v2.adjust_brightness, v2.adjust_contrast, v2.adjust_saturation, v2.adjust_hue)
SIZES = [(45, 45), (45, 30), (20, 45), (7, 9), (45, 44), (12, 45), (33, 33), (1, 1)]


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    """uint8 [3, height, width] whose pixels have nothing to do with each other: the hardest to resize."""
    return (256 * uniform(3, height, width, seed=seed)).byte()


def shades(height: int, width: int, seed: int = 0) -> Tensor:
    """uint8 [3, height, width] without detail: a few waves over the image."""
    phase = 6 * uniform(3, 3, seed=seed)
    y, x = torch.linspace(0, 3, height)[:, None], torch.linspace(0, 3, width)
    waves = [torch.sin(y + a) * torch.sin(x + b) + 0.5 * torch.sin(x - y + c) for a, b, c in phase]
    return (128 + 80 * torch.stack(waves)).round().byte()


def slots(images: Sequence[Tensor], slot: int = SLOT, padding: int = 0) -> Tensor:
    full = torch.full((len(images), slot, slot, 3), padding, dtype=torch.uint8)
    for place, image in zip(full, images, strict=True):
        place[: image.shape[1], : image.shape[2]] = image.permute(1, 2, 0)
    return full


def geometry(sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Of images that are stored as they are."""
    return torch.tensor([(height, width, height, width) for height, width in sizes], dtype=torch.int32)


def planes(x: Tensor) -> aug.Planes:
    red, green, blue = x.unbind(dim=1)
    return red, green, blue


def resampled(
    images: Tensor,
    boxes: Sequence[Sequence[float]] | Tensor,
    flip: Sequence[bool],
    size: int = SIZE,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return torch.stack(
        resample(images, torch.as_tensor(boxes, dtype=torch.float32), torch.tensor(flip), size, dtype), dim=1
    )


# The crop ----------------------------------------------------------------------------------------------------------


def torchvision_box(uniforms: Sequence[float], height: int, width: int) -> tuple[tuple[int, int, int, int], bool]:
    """RandomResizedCrop.get_params in plain Python, its draws made of the uniforms; whether a side was so close to a
    half that float32 may round it the other way."""
    close = False
    for area, ratio in zip(uniforms[:10], uniforms[10:20], strict=True):
        target, aspect = height * width * (0.7 + 0.3 * area), math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
        sides = math.sqrt(target / aspect), math.sqrt(target * aspect)
        close |= any(abs(side % 1 - 0.5) < 1e-4 for side in sides)
        h, w = round(sides[0]), round(sides[1])
        if 0 < w <= width and 0 < h <= height:
            return (int(uniforms[20] * (height - h + 1)), int(uniforms[21] * (width - w + 1)), h, w), close
    return central_box(height, width), close


def central_box(height: int, width: int) -> tuple[int, int, int, int]:
    """What RandomResizedCrop takes if nothing fits."""
    if width / height < 3 / 4:
        h, w = round(width / (3 / 4)), width
    elif width / height > 4 / 3:
        h, w = height, round(height * (4 / 3))
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


def test_crop_boxes_follow_torchvisions_rule() -> None:
    sizes = [*SIZES, (227, 227), (480, 640), (500, 100), (100, 500), (300, 400), (400, 300), (200, 370), (3000, 4500)]
    sizes = sizes * 50
    uniforms = uniform(len(sizes), SHARES[0])
    boxes = crop_boxes(uniforms, torch.tensor(sizes, dtype=torch.int32)).tolist()
    expected = [torchvision_box(u, *size) for u, size in zip(uniforms.double().tolist(), sizes, strict=True)]
    wrong = [
        size
        for size, box, (right, close) in zip(sizes, boxes, expected, strict=True)
        if tuple(box) != right and not close
    ]
    assert wrong == []
    assert sum(close for _, close in expected) < 0.05 * len(sizes)


@pytest.mark.parametrize("size", [(300, 300), (400, 280), (200, 370), (40, 80), (500, 100)])
def test_crops_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    draws = 2000
    torch.manual_seed(1)
    image = torch.empty(3, *size)
    theirs = np.array(
        [transforms.RandomResizedCrop.get_params(image, [0.7, 1.0], [3 / 4, 4 / 3]) for _ in range(draws)]
    )
    ours = crop_boxes(uniform(draws, SHARES[0], seed=2), torch.tensor([size]).expand(draws, 2)).double().numpy()

    assert (ours[:, :2] >= 0).all() and (ours[:, 2:] >= 1).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    for statistic in (
        lambda box: box[2] * box[3],
        lambda box: box[3] / box[2],
        lambda box: box[0],
        lambda box: box[1],
        lambda box: box[0] / (size[0] - box[2] + 1),
        lambda box: box[1] / (size[1] - box[3] + 1),
    ):
        assert stats.ks_2samp(statistic(ours.T), statistic(theirs.T), method="asymp").pvalue > 1e-3
    # How often nothing fits: never in a square, sometimes at 200 x 370, always in a long strip.
    counts = [int((boxes == central_box(*size)).all(axis=1).sum()) for boxes in (ours, theirs)]
    assert abs(counts[0] - counts[1]) < 4 * math.sqrt(sum(counts) + 1)
    if size in ((40, 80), (500, 100)):
        assert counts == [draws, draws]


def test_the_last_position_is_reached_and_none_beyond() -> None:
    uniforms = torch.full((1, SHARES[0]), 0.5)
    uniforms[:, 20:] = 1 - 2**-24  # the largest number below 1
    for side in range(2, 300):
        top, left, height, width = crop_boxes(uniforms, torch.tensor([[side, side]]))[0].tolist()
        assert (top + height, left + width) == (side, side)


# Resizing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20, 32, 60])
def test_resampled_boxes_are_torchvisions(size: int) -> None:
    boxes = [
        (0, 0, 45, 45),
        (0, 0, 40, 38),
        (5, 7, 40, 38),
        (3, 2, 30, 42),
        (44, 44, 1, 1),
        (0, 44, 45, 1),
        (2, 1, 20, 20),
        (10, 10, 32, 32),
    ]
    images = [noise(SLOT, SLOT, seed) for seed in range(len(boxes))]
    flip = [number % 2 == 1 for number in range(len(boxes))]
    ours = resampled(slots(images), boxes, flip, size)
    for image, box, mirrored, result in zip(images, boxes, flip, ours, strict=True):
        expected = v2.resized_crop(image.float() / 255, *box, [size, size], antialias=True)
        assert torch.equal(expected, classic.resized_crop(image.float() / 255, *box, [size, size], antialias=True))
        expected = v2.horizontal_flip(expected) if mirrored else expected
        torch.testing.assert_close(result, expected, atol=5e-6, rtol=0)  # a thousandth of a grey level
        # Pillow rounds to whole grey levels after either direction.
        pil = classic.resized_crop(Image.fromarray(image.permute(1, 2, 0).numpy()), *box, [size, size])
        pil = pil.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else pil
        assert (255 * result - classic.pil_to_tensor(pil)).abs().max() < 1.1


def test_nothing_of_the_padding_is_seen() -> None:
    images = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    black, white = slots(images), slots(images, padding=255)
    uniforms = uniform(len(SIZES), UNIFORMS)
    assert torch.equal(augment(black, geometry(SIZES), uniforms, SIZE), augment(white, geometry(SIZES), uniforms, SIZE))
    assert torch.equal(clean(black, geometry(SIZES), SIZE), clean(white, geometry(SIZES), SIZE))

    # Shrunk images: edges of the boxes are rounded in float32, a hundredth of a grey level at most.
    shrunk = geometry(SIZES) * torch.tensor([1, 1, 7, 3])
    difference = augment(black, shrunk, uniforms, SIZE) - augment(white, shrunk, uniforms, SIZE)
    assert difference.abs().max() < 0.01 / 255 / min(aug.STD)


def test_crops_of_a_shrunk_image_are_those_of_the_original() -> None:
    """Boxes with fractions. Without detail finer than the stored pixels the two differ by a third of a grey level on
    average (stored images are rounded to bytes), by two where a triangle is cut off at the border."""
    for original in ((90, 120), (46, 45), (200, 50)):
        image = shades(*original, seed=sum(original))
        stored = tuple(min(side, SLOT) for side in original)
        small = v2.resize(image, list(stored), antialias=True)
        scale = torch.tensor([stored[0] / original[0], stored[1] / original[1]] * 2)
        boxes = crop_boxes(uniform(8, SHARES[0]), torch.tensor([original]).expand(8, 2))
        boxes = torch.cat([boxes, torch.tensor([[0.0, 0, *original]])])
        ours = 255 * resampled(slots([small] * 9), boxes * scale, [False] * 9)
        theirs = torch.stack(
            [v2.resized_crop(image.float(), *map(int, box), [SIZE, SIZE], antialias=True) for box in boxes.tolist()]
        )
        difference = (ours - theirs).abs()
        assert difference.mean() < 0.35
        assert difference[:, :, 2:-2, 2:-2].max() < 1.5
        assert difference.max() < 2.5


def test_fractions_of_a_pixel_count_as_such() -> None:
    """Half a pixel of 200 beside a whole one of 50, resized to one: (0.5 200 + 50) / 1.5 weighed by the triangle."""
    image = torch.zeros(3, 1, 3, dtype=torch.uint8)
    image[:, 0] = torch.tensor([200, 50, 0], dtype=torch.uint8)
    ours = 255 * resampled(slots([image], slot=3), [(0, 0.5, 1, 1.5)], [False], size=1)
    weights = [0.5 * (1 - abs(0.5 - 1.25) / 1.5), 1 - abs(1.5 - 1.25) / 1.5]
    torch.testing.assert_close(ours[0, :, 0, 0], torch.full((3,), (200 * weights[0] + 50 * weights[1]) / sum(weights)))


def test_float16_products_are_within_an_eighth_of_a_grey_level() -> None:
    """What CUDA computes with: operands and results in float16."""
    images = slots(
        [
            noise(SLOT, SLOT),
            shades(SLOT, SLOT),
            noise(SLOT, SLOT, 1) // 128 * 255,
            torch.full((3, SLOT, SLOT), 255, dtype=torch.uint8),
        ]
    )
    boxes = crop_boxes(uniform(4, SHARES[0]), torch.tensor([[SLOT, SLOT]] * 4))
    exact = resampled(images, boxes, [True] * 4)
    half = resampled(images, boxes, [True] * 4, dtype=torch.float16)
    assert half.dtype == torch.float32
    assert 0 < 255 * (half - exact).abs().max() < 0.125
    assert 255 * (half - exact).abs().mean() < 0.025


def test_float16_products_of_much_larger_images_do_not_overflow() -> None:
    images = torch.stack([torch.zeros(900, 900, 3), torch.full((900, 900, 3), 255)]).byte()
    half = resampled(images, [(0, 0, 900, 900)] * 2, [False] * 2, 14, dtype=torch.float16)
    torch.testing.assert_close(half, torch.stack([torch.zeros(3, 14, 14), torch.ones(3, 14, 14)]), atol=1e-3, rtol=0)


# Colours -----------------------------------------------------------------------------------------------------------


def colours() -> Tensor:
    """[1, 3, 27, 40] in [0, 1]: random ones, all corners and edges of the cube, greys."""
    grid = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3)
    return torch.cat(
        [uniform(27, 37, 3), grid[:, None], grid[:, None] ** 2, uniform(27, 1, 1).expand(27, 1, 3)], dim=1
    ).permute(2, 0, 1)[None]


@pytest.mark.parametrize("operation", range(4))
@pytest.mark.parametrize("position", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_each_operation_is_torchvisions(operation: int, position: float) -> None:
    x = colours()
    factors = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    factor = (-0.3 if operation == aug.HUE else 0.7) + 0.6 * position
    factors[0, operation] = factor
    ours = torch.stack(jitter(planes(x), torch.arange(4)[None], factors), dim=1)
    torch.testing.assert_close(ours, OPERATIONS[operation](x, factor), atol=5e-6, rtol=0)
    torch.testing.assert_close(ours, getattr(classic, OPERATIONS[operation].__name__)(x, factor), atol=5e-6, rtol=0)
    assert jitter_factors(torch.full((1, 4), position))[0, operation].item() == pytest.approx(factor, abs=1e-6)


def test_grey_is_torchvisions() -> None:
    x = colours()
    for reference in (v2.rgb_to_grayscale, classic.rgb_to_grayscale):
        torch.testing.assert_close(aug.grey(planes(x)), reference(x)[:, 0], atol=1e-6, rtol=0)


def test_every_image_is_jittered_in_its_own_order() -> None:
    """One batch with all 24 orders, and strong factors, so that clamping makes the order matter."""
    x = torch.stack([uniform(3, 12, 16, seed=seed) for seed in range(24)])
    factors = jitter_factors(uniform(24, 4, seed=3).round())
    ranks = torch.tensor([[order.index(operation) for operation in range(4)] for order in ORDERS])
    ours = torch.stack(jitter(planes(x), uniform(24, 4, seed=4).sort().values.gather(1, ranks), factors), dim=1)
    for image, order, factor, result in zip(x, ORDERS, factors.tolist(), ours, strict=True):
        for operation in order:
            image = OPERATIONS[operation](image, factor[operation])
        torch.testing.assert_close(result, image, atol=2e-5, rtol=0)


def test_the_24_orders_are_equally_likely() -> None:
    order = uniform(12000, 4, seed=5)
    steps = torch.stack([step.long() for step in aug.jitter_steps(order)], dim=1)
    assert (steps[:, aug.HUE] == 7).all()
    for operation in range(4):
        assert all(aug.SEQUENCE[step] == operation for step in steps[:, operation].unique().tolist())
    counts = Counter(map(tuple, steps.argsort(dim=1).tolist()))
    assert set(counts) == set(ORDERS)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    assert torch.equal(steps.argsort(dim=1), order.argsort(dim=1))


# The whole ---------------------------------------------------------------------------------------------------------


def composed(image: Tensor, uniforms: Tensor, size: int, read: Callable[[Tensor], Image.Image | Tensor]) -> Tensor:
    """The transforms of one image [3, h, w] by torchvision with the parameters its uniforms stand for."""
    crop, flip, order, factors, grey = (part.tolist() for part in uniforms.double().split(SHARES))
    x = classic.resized_crop(read(image), *torchvision_box(crop, *image.shape[1:])[0], [size, size], antialias=True)
    if flip[0] < 0.5:
        x = classic.hflip(x)
    for operation in sorted(range(4), key=lambda operation: order[operation]):
        factor = 0.6 * factors[operation] + (-0.3 if operation == aug.HUE else 0.7)
        x = getattr(classic, OPERATIONS[operation].__name__)(x, factor)
    if grey[0] < 0.1:
        x = classic.rgb_to_grayscale(x, 3)
    tensor = x if isinstance(x, Tensor) else classic.to_tensor(x)
    return classic.normalize(tensor, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def test_augmentation_composes_torchvisions_transforms() -> None:
    images = [noise(*size, seed) if seed % 2 else shades(*size, seed) for seed, size in enumerate(SIZES * 4)]
    uniforms = uniform(len(images), UNIFORMS, seed=6)
    uniforms[::4, -1] *= 0.1  # enough grey ones
    assert 0 < (uniforms[:, SHARES[0]] < 0.5).sum() < len(images)
    ours = augment(slots(images), geometry(SIZES * 4), uniforms, SIZE)
    assert ours.shape == (len(images), 3, SIZE, SIZE) and ours.dtype == torch.float32
    assert ours.is_contiguous(memory_format=torch.channels_last)

    expected = [
        composed(image, u, SIZE, lambda image: image.float() / 255) for image, u in zip(images, uniforms, strict=True)
    ]
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-4, rtol=0)


def pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(("operation", "most"), [(0, 1.1), (1, 1.3), (2, 1.3), (3, 9.0)])
def test_each_operation_is_pillows_up_to_its_rounding(operation: int, most: float) -> None:
    """Pillow cuts every result off to bytes, half a grey level on average, and has 256 hues."""
    image = shades(60, 80)
    for position in (0.0, 0.3, 0.8, 1.0):
        factors = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
        factors[0, operation] = jitter_factors(torch.full((1, 4), position))[0, operation]
        ours = 255 * torch.stack(jitter(planes(image[None] / 255), torch.arange(4)[None], factors), dim=1)[0]
        apply = getattr(classic, OPERATIONS[operation].__name__)
        levels = (ours - classic.pil_to_tensor(apply(pillow(image), factors[0, operation].item()))).abs()
        assert levels.mean() < 1
        assert levels.max() < most


def test_the_whole_is_pillows_up_to_its_rounding() -> None:
    """Three operations cut off in a row: a grey level and a half darker on average; some hues differ by more."""
    sizes = [(SLOT, SLOT)] * 40
    images = [shades(*size, seed) for seed, size in enumerate(sizes)]
    uniforms = uniform(len(images), UNIFORMS, seed=7)
    ours = augment(slots(images), geometry(sizes), uniforms, SIZE)
    theirs = torch.stack([composed(image, u, SIZE, pillow) for image, u in zip(images, uniforms, strict=True)])
    levels = (ours - theirs).abs() * torch.tensor(aug.STD)[:, None, None] * 255
    assert levels.mean() < 1.8
    assert levels.flatten().quantile(0.99) < 7
    assert levels.max() < 20


def test_evaluation_resizes_both_sides() -> None:
    images = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    ours = clean(slots(images), geometry(SIZES), SIZE)
    expected = [
        v2.normalize(v2.resize(image.float() / 255, [SIZE, SIZE], antialias=True), aug.MEAN, aug.STD)
        for image in images
    ]
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-5, rtol=0)
    assert ours.dtype == torch.float32 and ours.is_contiguous(memory_format=torch.channels_last)


def test_bicubic_weights_are_torchvisions() -> None:
    """The products that compiled code uses, and the crop of every image; both clamp what bicubic weights overshoot."""
    images = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.6, 0.7)
    expected = torch.stack(
        [
            v2.normalize(
                v2.resize(image / 255, [SIZE, SIZE], v2.InterpolationMode.BICUBIC, antialias=True).clamp(0, 1),
                mean,
                std,
            )
            for image in images
        ]
    )
    settings = {"mean": mean, "std": std, "interpolation": "bicubic"}
    by_products = torch.compile(clean, backend="eager")
    for function in (clean, by_products):
        ours = function(slots(images), geometry(SIZES), SIZE, **settings)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)

    uniforms = uniform(len(images), UNIFORMS, seed=6)
    uniforms[:, SHARES[0]] = 1  # no flip
    uniforms[:, -SHARES[3] - SHARES[4] :] = torch.tensor([0.5] * SHARES[3] + [1])  # no jitter, no grey
    ours = augment(slots(images), geometry(SIZES), uniforms, SIZE, **settings)
    crops = []
    for image, u in zip(images, uniforms.double().tolist(), strict=True):
        box = torchvision_box(u[: SHARES[0]], *image.shape[1:])[0]
        crop = classic.resized_crop(image / 255, *box, [SIZE, SIZE], v2.InterpolationMode.BICUBIC, antialias=True)
        crops.append(v2.normalize(crop.clamp(0, 1), mean, std))
    torch.testing.assert_close(ours, torch.stack(crops), atol=1e-4, rtol=0)


def test_one_row_of_geometry_is_for_all_images() -> None:
    images = torch.randint(0, 256, (3, 12, 12, 3), dtype=torch.uint8)
    geometry = torch.tensor([[9, 11, 9, 11]])
    assert torch.equal(clean(images, geometry, 8), clean(images, geometry.expand(3, 4), 8))
    compiled = torch.compile(clean, backend="eager")  # by the products, as on a GPU
    torch.testing.assert_close(compiled(images, geometry, 8), clean(images, geometry, 8), rtol=0, atol=1e-5)


def test_images_that_fit_are_taken_as_they_are() -> None:
    images = slots([noise(SLOT, SLOT, seed) for seed in range(2)])
    ours = clean(images, geometry([(SLOT, SLOT)] * 2), SLOT, exact_fit=True)
    expected = torch.stack([v2.normalize(image.permute(2, 0, 1) / 255, aug.MEAN, aug.STD) for image in images])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours, clean(images, geometry([(SLOT, SLOT)] * 2), SLOT), atol=1e-5, rtol=0)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="exact_fit needs slots of 32 x 32"):
        clean(images, geometry([(SLOT, SLOT)] * 2), SIZE, exact_fit=True)


# How it runs -------------------------------------------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor, Tensor]:
    images = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    return slots(images), geometry(SIZES), uniform(len(SIZES), UNIFORMS)


@pytest.mark.skipif(
    not torch.cuda.is_available() and torch.__version__ < (2, 9), reason="PyTorch 2.8 calls the CUDA driver here"
)
def test_no_value_is_read_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values, on a GPU: anything that depends on one would raise, and what moves to the device too."""
    device = "cuda"
    monkeypatch.setattr(aug, "has_triton", lambda: False)
    with FakeTensorMode():
        images = torch.empty(4, SLOT, SLOT, 3, dtype=torch.uint8, device=device)
        sizes, uniforms = torch.empty(4, 4, dtype=torch.int32, device=device), torch.empty(4, UNIFORMS, device=device)
        for result in (
            augment(images, sizes, uniforms, SIZE),
            clean(images, sizes, SIZE),
            clean(images, sizes, SLOT, exact_fit=True),
        ):
            assert result.device.type == device and result.dtype == torch.float32
            assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_same_without_synchronising(monkeypatch: pytest.MonkeyPatch) -> None:
    images, sizes, uniforms = batch()
    exact = augment(images, sizes, uniforms, SIZE)
    images, sizes, uniforms = images.cuda(), sizes.cuda(), uniforms.cuda()
    augment(images, sizes, uniforms, SIZE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels = augment(images, sizes, uniforms, SIZE)
        monkeypatch.setattr(aug, "has_triton", lambda: False)
        plain = augment(images, sizes, uniforms, SIZE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result in (kernels, plain):
        levels = (result.cpu() - exact).abs() * torch.tensor(aug.STD)[:, None, None] * 255
        # The jitter may enlarge an error of the float16 products; hue of a nearly grey pixel most of all.
        assert levels.mean() < 0.05 and levels.max() < 0.6
