"""Boxes and points: the text of each family, scaled to the encoder input, and rejected records.

The records and texts named DOCUMENTED are from the documentation of ms-swift, which shows both of
them for Qwen2-VL. The other expected texts are computed manually.
"""

import functools
import json

import pytest
from data_cases import encode, write_parquet
from model_cases import COMPOSITES
from PIL import Image
from transformers import PreTrainedTokenizerFast

from torchmm.common.batch import TextSpec
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.sample import Record, SampleOptions
from torchmm.data.sources.map_sources import open_map_source
from torchmm.data.sources.reader import SampleReader
from torchmm.models.build import build_model
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

BOX_TOKENS = ["<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"]
BOX_TOKENS += ["<ref>", "</ref>", "<box>", "</box>"]
QWEN2_5_VL = {  # patches of 14 pixels, 2 x 2 of which are a token
    "model_type": "qwen2_5_vl",
    "text_config": {
        "vocab_size": 151680, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "depth": 1, "fullatt_block_indexes": [0],
        "num_heads": 2, "out_hidden_size": 32,
    },
}  # fmt: skip
CONFIGS = {**COMPOSITES, "qwen2_5_vl": QWEN2_5_VL}
PAIR = ModelConfig(
    llm={"config": COMPOSITES["llava"]["text_config"]},
    encoders={"vision": {"config": COMPOSITES["llava"]["vision_config"]}},
    image_token="<image>",
)


@functools.cache
def image(width: int, height: int, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(Image.new("RGB", (width, height)), "JPEG", exif=exif)


@functools.cache
def specs(family: str, max_pixels: int | None = None):
    """Return the box format and the image specs of a tiny model of a family."""
    config = PAIR
    if family != "pair":
        processor = max_pixels and {"size": {"shortest_edge": 3136, "longest_edge": max_pixels}}
        config = ModelConfig(config=CONFIGS[family], processor=processor)
    model = build_model(config, FreezeConfig())
    return model.text.boxes, model.image_specs()


@pytest.fixture(scope="module")
def box_tokenizer(tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of boxes."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    copied = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    copied.add_special_tokens({"additional_special_tokens": BOX_TOKENS})
    return copied


@pytest.fixture(scope="module")
def make_reader(box_tokenizer):
    """Return a function that creates the reader of a family."""

    @functools.cache
    def make(family: str, max_pixels: int | None = None) -> SampleReader:
        boxes, image_specs = specs(family, max_pixels)
        text = TextSpec(
            vocab_size=len(box_tokenizer),
            image_token_id=box_tokenizer.convert_tokens_to_ids("<image>"),
            boxes=boxes,
        )
        return SampleReader(DataConfig(), 100_000, text, image_specs, box_tokenizer)

    return make


@pytest.fixture(scope="module")
def read(make_reader):
    """Return a function that reads a record for a family."""

    def read_record(columns: dict, family: str = "qwen2_5_vl", max_pixels=None, **options):
        reader = make_reader(family, max_pixels)
        return reader.read(Record(columns, None, SampleOptions(**options)))

    return read_record


def loss_text(tokenizer, sample) -> str:
    ids = [k for k, loss in zip(sample.text.ids, sample.text.loss, strict=True) if loss]
    return tokenizer.decode(ids)


@pytest.fixture(scope="module")
def answer(read, box_tokenizer):
    """Return a function that reads a record, and returns the text in the loss."""
    return lambda *arguments, **options: loss_text(
        box_tokenizer, read(*arguments, **options)
    ).removesuffix("</s>")


def chat(question: str, reply: str, *images: bytes, **columns: object) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": messages, "images": list(images), **columns}


def grounding(*boxes: object, question: str = "<image>where?", images=None, **objects: object):
    """Return a chat whose answer has these boxes."""
    objects = {"bbox": list(boxes), **objects}
    images = [image(640, 480)] if images is None else images
    return chat(question, " ".join(["<bbox>"] * len(boxes)), *images, objects=objects)


BOX = [100, 50, 320, 240]
DOCUMENTED = [
    (
        chat(
            "<image>Describe the image.",
            "<ref-object><bbox> and <ref-object><bbox> are playing on the beach",
            image(1500, 1800),
            objects={
                "ref": ["a dog", "a woman"],
                "bbox": [[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]],
            },
        ),
        "Describe the image.",
        "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|> "
        "and <|object_ref_start|>a woman<|object_ref_end|><|box_start|>(451,381),(733,793)"
        "<|box_end|> are playing on the beach",
    ),
    (
        chat(
            "<image>Find the <ref-object> in the image",
            "<bbox><bbox>",
            image(900, 800),
            objects={
                "ref": ["sheep"],
                "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]],
            },
        ),
        "Find the <|object_ref_start|>sheep<|object_ref_end|> in the image",
        "<|box_start|>(101,201),(150,266)<|box_end|><|box_start|>(401,601),(550,666)<|box_end|>",
    ),
    (
        chat(
            "<image>Help me open Google Chrome",
            "Action: click(start_box='<bbox>')",
            image(2500, 2000),
            objects={"ref": [], "bbox": [[615, 226]]},
        ),
        "Help me open Google Chrome",
        "Action: click(start_box='<|box_start|>(246,113)<|box_end|>')",
    ),
]


@pytest.mark.parametrize(("record", "question", "reply"), DOCUMENTED)
def test_qwen2_vl_text_matches_documentation(read, box_tokenizer, record, question, reply):
    sample = read(record, "qwen2_vl")
    count = sample.images[0].tokens
    text = f"<|user|>{'<image>' * count}{question}</s><|assistant|>{reply}</s>"
    assert sample.text.ids == box_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert loss_text(box_tokenizer, sample) == reply + "</s>"
    written = chat("<image>" + question, reply, *record["images"])
    assert read(written, "qwen2_vl").text == sample.text


def test_special_tokens_other_than_boxes_remain_text(read, box_tokenizer):
    sample = read(chat("<image>a", "<|user|><|box_start|>", image(64, 64)), "qwen2_vl")
    ids = [k for k, loss in zip(sample.text.ids, sample.text.loss, strict=True) if loss]
    assert box_tokenizer.convert_tokens_to_ids("<|box_start|>") in ids
    assert box_tokenizer.convert_tokens_to_ids("<|user|>") not in ids


JSON_REPLY = '[\n\t{"bbox_2d": <bbox>, "label": "<ref-object>"}, {"point_2d": <bbox>}\n]'


@pytest.mark.parametrize(
    ("family", "box", "point", "name"),
    [
        # 640 x 480 is resized to 644 x 476, the nearest multiples of 28.
        ("qwen2_5_vl", "[101, 50, 322, 238]", "[644, 0]", "dog"),
        ("qwen3_vl", "[156, 104, 500, 500]", "[1000, 0]", "dog"),
        ("pair", "[156, 104, 500, 500]", "[1000, 0]", "dog"),
        (
            "internvl",
            "<box>[[156, 104, 500, 500]]</box>",
            "<box>[[1000, 0]]</box>",
            "<ref>dog</ref>",
        ),
    ],
)
def test_boxes_have_coordinates_of_family(answer, family, box, point, name):
    objects = {"ref": ["dog"], "bbox": [BOX, [640.2, -0.2]], "bbox_type": "real"}
    record = chat("<image>where?", JSON_REPLY, image(640, 480), objects=objects)
    expected = JSON_REPLY.replace("<ref-object>", name)
    expected = expected.replace("<bbox>", box, 1).replace("<bbox>", point)
    assert answer(record, family) == expected
    assert answer({**record, "objects": json.dumps(objects)}, family) == expected
    fractions = {**objects, "bbox_type": "norm1", "bbox": [[0.15625, 0.1042, 0.5, 0.5], [1, 0]]}
    assert answer({**record, "objects": fractions}, family) == expected


@pytest.mark.parametrize(
    ("max_pixels", "expected", "tokens"),
    [(None, "[101, 50, 322, 238]", 23 * 17), (28 * 28 * 100, "[48, 23, 154, 112]", 11 * 8)],
)
def test_boxes_follow_resolution_of_encoder(read, answer, max_pixels, expected, tokens):
    record = grounding(BOX)
    assert answer(record, max_pixels=max_pixels) == expected
    assert read(record, max_pixels=max_pixels).images[0].tokens == tokens
    assert answer(record, "qwen3_vl") == "[156, 104, 500, 500]"


def test_boxes_follow_pixel_limit_of_record(read, answer):
    limited = {"image": image(640, 480), "max_pixels": 28 * 28 * 100}
    record = grounding(BOX, images=[limited])
    assert answer(record) == "[48, 23, 154, 112]"
    assert read(record).images[0].tokens == 11 * 8


def test_boxes_of_several_images_use_their_sizes(answer):
    images = [image(640, 480), image(280, 560)]
    record = grounding(
        BOX, BOX, [280, 560], images=images, question="<image><image>", image_id=[0, 1, 1]
    )
    record["objects"]["bbox"][1] = [14, 28, 140, 280]
    assert answer(record) == "[101, 50, 322, 238] [14, 28, 140, 280] [280, 560]"
    assert answer(record, "qwen3_vl") == "[156, 104, 500, 500] [50, 50, 500, 500] [1000, 1000]"
    record["objects"]["image_id"] = []
    assert answer(grounding(BOX, images=images, question="<image><image>")) == "[101, 50, 322, 238]"


def test_parquet_source_has_boxes(tmp_path, make_reader, box_tokenizer):
    first = grounding(BOX, ref=None, image_id=None)
    second = grounding(BOX, [100, 50], bbox_type="real", image_id=[0, 0])
    second["messages"][1]["content"] = '<bbox> <bbox> {"point_2d": [320, 240]}'
    for record in (first, second):
        record["images"] = [{"bytes": record["images"][0], "path": None}]
    path = write_parquet(tmp_path / "set", [first, second])
    source = open_map_source(SourceConfig(path=str(path), box_format="pixels"))
    reader = make_reader("qwen2_5_vl")
    texts = [loss_text(box_tokenizer, reader.read(source.read(i))) for i in (0, 1)]
    box = "[101, 50, 322, 238]"
    assert texts == [f"{box}</s>", f'{box} [101, 50] {{"point_2d": [322, 238]}}</s>']


def test_boxes_refer_to_upright_image(answer):
    rotated = [image(480, 640, 6)]  # displayed as 640 x 480
    assert answer(grounding(BOX, images=rotated)) == "[101, 50, 322, 238]"


def test_placeholders_are_filled_in_reading_order(answer):
    record = {
        "texts": [{"user": "<bbox>?", "assistant": "<ref-object> <bbox>"},
                  {"user": "<ref-object>", "assistant": "<bbox>"}],
        "image": image(1000, 1000),
        "objects": {"ref": ["dog", "cat"], "bbox": [[1, 1], [2, 2], [3, 3]]},
    }  # fmt: skip
    assert answer(record, "qwen3_vl") == "dog [2, 2]</s>[3, 3]"


def test_indexed_sample_equals_measured_sample(make_reader):
    reader = make_reader("qwen2_5_vl")
    record = Record(grounding(BOX))
    measured = reader.read(record)
    indexed = reader.read(record, reader.meta("a", 0, measured))
    assert (indexed.text, indexed.images) == (measured.text, measured.images)


def test_placeholder_without_objects_is_text(answer):
    assert answer(chat("<image>a", "<bbox>", image(64, 64), objects=None)) == "<bbox>"


def test_objects_without_placeholder_are_metadata(answer):
    objects = {"bbox": [[1, 2, 3000, 4]], "categories": [3]}
    assert answer(chat("<image>a", "two", image(64, 64), objects=objects)) == "two"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (grounding(BOX, ref=["dog"]), "0 <ref-object> placeholders but 1 entries in objects.ref"),
        (grounding(BOX, bbox=[BOX, BOX]), "1 <bbox> placeholders but 2 entries in objects.bbox"),
        (grounding(BOX, bbox=[], ref=["a"]), "0 <ref-object> placeholders but 1 entries"),
        (chat("<image>a", "<bbox>", image(64, 64), objects={}), "1 <bbox> placeholders but 0 "),
        (grounding([0, 0, 641, 2]), r"box 0 .*\[0, 0, 641, 2\], which is outside of its image of "
         "640 x 480 pixels"),
        (grounding([0, -1]), "outside of its image"),
        (grounding(BOX, bbox_type="norm1"), "outside of its image of 1 x 1"),
        (grounding([50, 50, 40, 60]), "second corner is left of or above the first"),
        (grounding([1, 2, 3]), r"box 0 of column objects is a list with 3 elements; use \[x1"),
        (grounding([1, float("nan")]), "list with 2 elements; use"),
        (grounding([1, 10**400]), "list with 2 elements; use"),
        (grounding([1, True]), "list with 2 elements; use"),
        (grounding("1, 2"), "box 0 of column objects is '1, 2'"),
        (grounding(BOX, image_id=[1]), "belongs to image 1, but the record has 1 images"),
        (grounding(BOX, image_id=[-1]), "belongs to image -1"),
        (grounding(BOX, image_id=[0, 0]), "image_id has 2 entries, but objects.bbox has 1"),
        (grounding(BOX, image_id=0), "objects.image_id is 0, not a list"),
        (grounding(BOX, images=[], question="a"), "image 0, but the record has 0 images"),
        (grounding(BOX, bbox_type="norm999"), "bbox_type is 'norm999'; use real or norm1"),
        (grounding(BOX, bbox_type=["real"]), "bbox_type is a list"),
        (chat("<image>a", "<bbox>", image(64, 64), objects=[1]), "a list .*, not an object with"),
        (chat("<image>a", "<bbox>", image(64, 64), objects="{"), "column objects: .*not valid"),
        (chat("<image><ref-object>", "a", image(64, 64), objects={"ref": [3]}), "contains 3; use"),
        (chat("<image>", "<ref-object>", image(64, 64), objects={"ref": ["<bbox>"]}),
         "objects.ref contains '<bbox>'"),
        (chat("<image>a", "<box>", image(64, 64), box=[1]), "text contains <box>, but column box"),
        (grounding(BOX, question="<image><point>"), "text contains <point>, but column objects"),
    ],
)  # fmt: skip
def test_wrong_boxes_are_rejected(read, record, reason):
    with pytest.raises(CorruptSampleError, match=reason):
        read(record)


def test_family_without_box_format_is_rejected(read):
    with pytest.raises(CorruptSampleError, match="column objects is not supported"):
        read(grounding(BOX), "llava")
    with pytest.raises(CorruptSampleError, match=r"box_format = .pixels. .* requires a model"):
        read(chat("<image>a", "two", image(64, 64)), "llava", box_format="pixels")


@pytest.mark.parametrize(
    ("unit", "family", "numbers", "expected"),
    [
        ("pixels", "qwen2_5_vl", ("100, 50,320,240", "(100,50),(320,240)"),
         ("101, 50,322,238", "(101,50),(322,238)")),
        ("pixels", "qwen3_vl", ("100, 50,320,240", "(100,50),(320,240)"),
         ("156, 104,500,500", "(156,104),(500,500)")),
        ("norm1", "qwen3_vl", ("0.25, .5e0, 1, 1.0", "(0.25,0.5)"),
         ("250, 500, 1000, 1000", "(250,500)")),
        ("norm1000", "qwen2_5_vl", ("250, 500", "(0,0),(1000,1000)"),
         ("161, 238", "(0,0),(644,476)")),
    ],
)  # fmt: skip
def test_box_format_converts_text(answer, unit, family, numbers, expected):
    reply = '{"bbox_2d": [%s], "label": "a 7"} <|box_start|>%s<|box_end|>, 12'
    record = chat("<image>where?", reply % numbers, image(640, 480))
    assert answer(record, family, box_format=unit) == reply % expected
    assert answer(record, family) == reply % numbers


@pytest.mark.parametrize(
    ("reply", "images", "reason"),
    [
        ('{"bbox_2d": [1, 2]}', 0, "requires one image, but the record has 0"),
        ('{"bbox_2d": [1, 2]}', 2, "requires one image, but the record has 2"),
        ('{"bbox_2d": [[1, 2, 3, 4]]}', 1, "is a list with 0 elements"),
        ('{"bbox_2d": [1, 2, 3]}', 1, "is a list with 3 elements"),
        ('{"point_2d": [1, 2000]}', 1, "outside of its image"),
        ('{"point_2d": [1, x2]}', 1, "is '1, x2'; use"),
    ],
)
def test_wrong_boxes_in_text_are_rejected(read, reply, images, reason):
    record = chat("<image>" * images + "a", reply, *[image(64, 64)] * images)
    assert any(read(record).text.loss)
    with pytest.raises(CorruptSampleError, match=reason):
        read(record, box_format="pixels")


def test_text_and_placeholders_are_not_converted_twice(answer):
    record = grounding(BOX)
    record["messages"][1]["content"] = '{"bbox_2d": <bbox>}'
    expected = '{"bbox_2d": [101, 50, 322, 238]}'
    assert answer(record, box_format="pixels") == expected
