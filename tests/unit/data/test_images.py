from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import transformers
from data_cases import CLIP, GLM, NAFLEX, QWEN, encode, png
from PIL import Image, features

from torchmm.common.batch import ImageSpec
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import ImagePreprocessor, decode_rgb, read_size

LIMIT = 64_000_000


def huge_png(width, height):
    """Return a PNG with a valid header and almost no data."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


ZOO = {
    "zero bytes": b"",
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "wrong magic": b"\x89PNX" + png(8, 8)[4:],
    "100 megapixels": huge_png(10_000, 10_000),
    "400 megapixels": huge_png(20_000, 20_000),
    "thin": huge_png(10_000, 1),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
}


@pytest.mark.parametrize("kind", ZOO)
def test_invalid_header_is_rejected_without_decoding(kind):
    tracemalloc.start()
    with pytest.raises(CorruptSampleError):
        read_size(ZOO[kind], LIMIT)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 5e6  # decoding 100 megapixels uses 300 MB


def long_header(kind, megabytes):
    """Return an image whose header has comments or metadata of a number of megabytes."""
    if kind == "PPM comment":
        return b"P6\n#" + b"x" * (megabytes * 10**6) + b"\n2 2 255\n" + bytes(12)
    if kind == "PNG eXIf":
        plain, chunk = png(8, 8), b"eXIf" + b"MM\0*\0\0\0\x08" + bytes(megabytes * 10**6)
        sums = struct.pack(">I", len(chunk) - 4), struct.pack(">I", zlib.crc32(chunk))
        return plain[:33] + sums[0] + chunk + sums[1] + plain[33:]
    plain, exif = encode(Image.new("RGB", (8, 8)), "JPEG"), b"Exif\0\0" + bytes(60_000)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    return plain[:2] + segment * (megabytes * 10**6 // len(segment)) + plain[2:]


@pytest.mark.parametrize("kind", ["PPM comment", "PNG eXIf", "JPEG Exif"])
def test_images_with_huge_headers_are_corrupt(kind):
    with pytest.raises(
        CorruptSampleError, match="its header is larger than 16 MiB or has more than 100,000"
    ):
        read_size(long_header(kind, 20), LIMIT)


@pytest.mark.parametrize("kind", ["PNG eXIf", "JPEG Exif"])
def test_images_with_large_metadata_are_read(kind):
    assert decode_rgb(long_header(kind, 2), LIMIT).size == (8, 8)


def test_image_of_one_pixel_is_read():
    assert decode_rgb(png(1, 1), LIMIT).size == (1, 1)


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "BMP", "TIFF"])
def test_pixels_are_excluded_from_header_limit(fmt, monkeypatch):
    monkeypatch.setattr("torchmm.data.media.images.MAX_HEADER_BYTES", 10_000)
    assert decode_rgb(encode(Image.open(io.BytesIO(png(200, 200))), fmt), LIMIT).size == (200, 200)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP"])
def test_truncated_image_fails_when_decoded(fmt):
    data = encode(Image.effect_noise((64, 64), 50).convert("RGB"), fmt)
    data = data[: len(data) * 2 // 3]
    with pytest.raises(CorruptSampleError, match=r"decoded|not an image"):
        read_size(data, LIMIT)
        decode_rgb(data, LIMIT)


def rgb(image, fmt="PNG", **options):
    """Return pixel (0, 0) of an image that was encoded and decoded."""
    return decode_rgb(encode(image, fmt, **options), LIMIT).getpixel((0, 0))


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
def test_avif_images_are_read():
    file = io.BytesIO()
    Image.new("RGB", (40, 24), (200, 30, 90)).save(file, "AVIF", quality=100)
    assert read_size(file.getvalue(), 10_000) == (40, 24)
    pixels = np.asarray(decode_rgb(file.getvalue(), 10_000))
    assert pixels.shape == (24, 40, 3)
    assert np.abs(pixels.astype(int) - (200, 30, 90)).max() <= 4


def test_transparency_is_blended_with_white():
    assert rgb(Image.new("RGBA", (2, 2), (255, 0, 0, 0))) == (255, 255, 255)
    assert rgb(Image.new("RGBA", (2, 2), (255, 0, 0, 51))) == (255, 204, 204)
    assert rgb(Image.new("LA", (2, 2), (0, 51))) == (204, 204, 204)
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert rgb(palette) == (10, 20, 30)
    assert rgb(palette, transparency=1) == (255, 255, 255)
    assert rgb(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3)) == (255, 255, 255)


def test_gray_and_bilevel_become_rgb():
    assert rgb(Image.new("L", (2, 2), 77)) == (77, 77, 77)
    assert rgb(Image.new("1", (2, 2), 1)) == (255, 255, 255)


def test_high_bit_depths_are_scaled():
    values = np.full((2, 2), 0x8080, np.uint16)
    assert rgb(Image.fromarray(values)) == (128, 128, 128)
    assert rgb(Image.fromarray(np.full((2, 2), 0.5, np.float32)), "TIFF") == (128, 128, 128)
    wide = Image.fromarray(np.asarray([[-1.0, 3.0]], np.float32))
    decoded = decode_rgb(encode(wide, "TIFF"), LIMIT)
    assert [decoded.getpixel((x, 0))[0] for x in (0, 1)] == [0, 255]


def test_non_finite_pixels_are_corrupt():
    image = Image.fromarray(np.asarray([[np.nan, 1.0]], np.float32))
    with pytest.raises(CorruptSampleError, match="finite"):
        decode_rgb(encode(image, "TIFF"), LIMIT)


def test_cmyk_becomes_rgb():
    assert rgb(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF") == (255, 0, 0)


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_to_size_and_pixels(orientation, fmt):
    upright = Image.new("L", (16, 8), 0)
    upright.paste(255, (0, 0, 8, 4))  # top left quarter is white
    stored = {
        1: lambda i: i,
        2: lambda i: i.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda i: i.transpose(Image.Transpose.ROTATE_180),
        4: lambda i: i.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda i: i.transpose(Image.Transpose.TRANSPOSE),
        6: lambda i: i.transpose(Image.Transpose.ROTATE_90),
        7: lambda i: i.transpose(Image.Transpose.TRANSVERSE),
        8: lambda i: i.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored.convert("RGB"), fmt, exif=exif)
    assert read_size(data, LIMIT) == (16, 8)
    image = decode_rgb(data, LIMIT)
    assert image.size == (16, 8)
    corners = [image.getpixel(xy)[0] > 128 for xy in ((1, 1), (14, 1), (1, 6), (14, 6))]
    assert corners == [True, False, False, False]


def test_header_check_does_not_decode(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("decoded")

    data = png(20, 10)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    assert read_size(data, LIMIT) == (20, 10)


SIZES = [(1, 1), (3, 500), (500, 3), (16, 24), (37, 53), (224, 224), (640, 480), (99, 1234)]


@pytest.mark.parametrize("spec", [CLIP, NAFLEX, QWEN, GLM], ids=lambda s: s.processor_class)
def test_pixels_match_hugging_face_processor_bitwise(spec):
    processor = getattr(transformers, spec.processor_class + "Pil").from_dict(spec.processor)
    ours = ImagePreprocessor(spec)
    for seed, (width, height) in enumerate(SIZES):
        if max(width, height) > 200 * min(width, height):
            continue
        image = Image.open(io.BytesIO(png(width, height, seed)))
        theirs = processor(images=[image], return_tensors="np")
        expected = theirs["pixel_values"]
        if "pixel_attention_mask" in theirs:
            expected = expected[theirs["pixel_attention_mask"].astype(bool)]
        expected = expected[0] if spec is CLIP else expected
        np.testing.assert_array_equal(ours.pixels(image), expected)
        assert ours.pixels(image).dtype == np.float32


@pytest.mark.parametrize("spec", [CLIP, NAFLEX, QWEN, GLM], ids=lambda s: s.processor_class)
def test_image_sizes_are_computed_without_decoding(spec):
    ours = ImagePreprocessor(spec)
    rng = np.random.default_rng(0)
    sizes = SIZES + [(int(w), int(h)) for w, h in rng.integers(1, 300, (150, 2))]
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        pixels = ours.pixels(Image.new("RGB", (width, height)))
        grid, meta = ours.grid(width, height), ours.meta(width, height)
        assert grid.rows * grid.columns == meta.patches
        assert meta.tokens == meta.patches // spec.merge**2
        assert pixels.shape == ours.blank(width, height).shape
        if spec is not CLIP:
            assert pixels.shape[0] == meta.patches
        if spec in (QWEN, GLM):
            outputs = ours.processor(images=[Image.new("RGB", (width, height))])
            assert list(outputs["image_grid_thw"][0]) == [1, grid.rows, grid.columns]


def test_fixed_size_processor_is_measured():
    spec = ImageSpec(
        "vision", "fixed", "SiglipImageProcessorFast", {"size": {"height": 32, "width": 48}}, 16
    )
    assert ImagePreprocessor(spec).meta(500, 10).tokens == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processor_class": "NoSuchProcessor"}, "no image processor"),
        ({"inputs": "patches"}, "makes no patches"),
        ({"processor": {"size": {"shortest_edge": 16}, "do_center_crop": False}}, "fixed size"),
        ({"merge": 4}, "not divisible"),
    ],
)
def test_unsupported_processor_is_rejected(change, message):
    with pytest.raises(ConfigError, match=message):
        ImagePreprocessor(ImageSpec(**{**vars(CLIP), **change}))


def test_patch_size_that_differs_from_encoder_is_rejected():
    with pytest.raises(ConfigError, match="patch size 4, encoder 8"):
        ImagePreprocessor(ImageSpec(**{**vars(QWEN), "patch_size_px": 8}))
