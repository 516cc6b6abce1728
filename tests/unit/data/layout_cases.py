"""Records in published formats, and the same content in the format of torchmm."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from data_cases import png

FILES = {
    "00453/004539375.jpg": png(24, 16, 1),
    "coco/train2017/000000033471.jpg": png(16, 16, 2),
    "mllm_demo_data/1.jpg": png(40, 24, 3),
    "mllm_demo_data/2.jpg": png(24, 40, 4),
}
"""Files in the directory of the source."""
LLAVA, COCO, FIRST, SECOND = FILES
DATA_ADDRESS = "data:image/png;base64," + base64.b64encode(FILES[FIRST]).decode()
IMAGE = object()
CHOOSE = "Answer with the option's letter from the given choices directly."


class Case(NamedTuple):
    """A published record and its expected content."""

    record: dict[str, Any]
    turns: list[tuple[str, Any]]
    """Role and content in the format of torchmm.

    IMAGE is a placeholder for the next of `images`.
    """
    images: tuple[str, ...] = ()


def image(*names: str) -> list[dict[str, Any]]:
    """Return the columns of `datasets`: bytes and path."""
    return [{"bytes": FILES[name], "path": name.rpartition("/")[2]} for name in names]


def say(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CASES = {
    # liuhaotian/LLaVA-Pretrain, blip_laion_cc_sbu_558k.json
    "llava_pretrain": Case(
        {
            "id": "004539375",
            "image": LLAVA,
            "conversations": [
                say("human", "Render a clear and concise summary of the photo.\n<image>"),
                say("gpt", "select luxury furniture 3 - inch gel memory foam mattress topper"),
            ],
        },
        [
            ("user", ["Render a clear and concise summary of the photo.\n", IMAGE]),
            ("assistant", "select luxury furniture 3 - inch gel memory foam mattress topper"),
        ],
        (LLAVA,),
    ),
    # LLaVA, docs/Finetune_Custom_Data.md: trailing spaces are preserved
    "llava_custom": Case(
        {
            "id": "997bb945-628d-4724-b370-b84de974a19f",
            "image": LLAVA,
            "conversations": [
                say(
                    "human",
                    "<image>\nWrite a prompt for Stable Diffusion to generate this image.",
                ),
                say("gpt", "a beautiful painting of chernobyl by nekro. octane render. "),
            ],
        },
        [
            (
                "user",
                [IMAGE, "\nWrite a prompt for Stable Diffusion to generate this image."],
            ),
            ("assistant", "a beautiful painting of chernobyl by nekro. octane render. "),
        ],
        (LLAVA,),
    ),
    # liuhaotian/LLaVA-Instruct-150K, llava_v1_5_mix665k.json
    "llava_instruct": Case(
        {
            "id": "000000033471",
            "image": COCO,
            "conversations": [
                say("human", "<image>\nWhat are the colors of the bus in the image?"),
                say("gpt", "The bus in the image is white and red."),
                say("human", "What feature can be seen on the back of the bus?"),
                say("gpt", "The back of the bus features an advertisement."),
            ],
        },
        [
            ("user", [IMAGE, "\nWhat are the colors of the bus in the image?"]),
            ("assistant", "The bus in the image is white and red."),
            ("user", "What feature can be seen on the back of the bus?"),
            ("assistant", "The back of the bus features an advertisement."),
        ],
        (COCO,),
    ),
    # lmms-lab/M4-Instruct-Data (LLaVA-NeXT-Interleave): several images, also in later turns
    "llava_interleave": Case(
        {
            "sample_id": 7,
            "image": [FIRST, SECOND],
            "metadata": {"dataset": "Spot-the-Diff", "split": "train"},
            "conversations": [
                say("human", "Here is one <image>."),
                say("gpt", "I see."),
                say("human", "And <image> another.\nWhat changed?"),
                say("gpt", "The size."),
            ],
        },
        [
            ("user", ["Here is one ", IMAGE, "."]),
            ("assistant", "I see."),
            ("user", ["And ", IMAGE, " another.\nWhat changed?"]),
            ("assistant", "The size."),
        ],
        (FIRST, SECOND),
    ),
    # LLaMA-Factory, data/README.md, sharegpt format with a system prompt
    "llama_factory_sharegpt": Case(
        {
            "conversations": [say("human", "instruction"), say("gpt", "response")],
            "system": "system prompt",
            "tools": "[]",
        },
        [("system", "system prompt"), ("user", "instruction"), ("assistant", "response")],
    ),
    # LLaMA-Factory, data/mllm_demo.json
    "llama_factory_images": Case(
        {
            "messages": [
                turn("user", "<image>Who are they?"),
                turn("assistant", "They're Kane and Gretzka from Bayern Munich."),
                turn("user", "What are they doing?<image>"),
                turn("assistant", "They are celebrating on the soccer field."),
            ],
            "images": [FIRST, SECOND],
        },
        [
            ("user", [IMAGE, "Who are they?"]),
            ("assistant", "They're Kane and Gretzka from Bayern Munich."),
            ("user", ["What are they doing?", IMAGE]),
            ("assistant", "They are celebrating on the soccer field."),
        ],
        (FIRST, SECOND),
    ),
    # ms-swift, Custom-dataset.md, pre-training: placeholders in an assistant message
    "ms_swift_messages": Case(
        {
            "messages": [turn("assistant", "<image>is a puppy, <image>is a kitten")],
            "images": [FIRST, SECOND],
        },
        [("assistant", [IMAGE, "is a puppy, ", IMAGE, "is a kitten"])],
        (FIRST, SECOND),
    ),
    # ms-swift, Custom-dataset.md, query-response and sharegpt formats
    "ms_swift_query": Case(
        {
            "system": "You are a useful assistant",
            "query": "<image>And this?",
            "response": "A kitten.",
            "history": [["What is <image>?", "A puppy."]],
            "images": [FIRST, SECOND],
        },
        [
            ("system", "You are a useful assistant"),
            ("user", ["What is ", IMAGE, "?"]),
            ("assistant", "A puppy."),
            ("user", [IMAGE, "And this?"]),
            ("assistant", "A kitten."),
        ],
        (FIRST, SECOND),
    ),
    "ms_swift_sharegpt": Case(
        {
            "system": "Be kind.",
            "conversation": [
                {"human": "query1", "assistant": "response1"},
                {"human": "query2", "assistant": "response2"},
            ],
        },
        [
            ("system", "Be kind."),
            ("user", "query1"),
            ("assistant", "response1"),
            ("user", "query2"),
            ("assistant", "response2"),
        ],
    ),
    # tatsu-lab/alpaca, which repeats all fields in `text`
    "alpaca": Case(
        {
            "instruction": "Classify the following into animals, plants, and minerals",
            "input": "Oak tree, copper ore, elephant",
            "output": "Animals: elephant; plants: oak tree; minerals: copper ore",
            "text": "Below is an instruction that describes a task, paired with an input.",
        },
        [
            (
                "user",
                "Classify the following into animals, plants, and minerals\n"
                "Oak tree, copper ore, elephant",
            ),
            ("assistant", "Animals: elephant; plants: oak tree; minerals: copper ore"),
        ],
    ),
    # LLaMA-Factory, data/README.md, alpaca format
    "llama_factory_alpaca": Case(
        {
            "instruction": "<image>human instruction",
            "input": "",
            "output": "model response",
            "system": "system prompt",
            "history": [["first instruction", "first response"]],
            "images": [FIRST],
        },
        [
            ("system", "system prompt"),
            ("user", "first instruction"),
            ("assistant", "first response"),
            ("user", [IMAGE, "human instruction"]),
            ("assistant", "model response"),
        ],
        (FIRST,),
    ),
    # HuggingFaceM4/FineVision
    "finevision": Case(
        {
            "images": image(FIRST, SECOND),
            "texts": [
                {"user": "What is shown?", "assistant": "Two images."},
                {"user": "Which is larger?", "assistant": "None is."},
            ],
            "source": "ai2d",
            "relevance_ratings": [5, 4],
            "relevance_min": 4,
            "image_correspondence_ratings": [5, 5],
            "image_correspondence_min": 5,
            "visual_dependency_ratings": [2, 1],
            "visual_dependency_min": 1,
            "formatting_ratings": [5, 5],
            "formatting_min": 5,
        },
        [
            ("user", [IMAGE, IMAGE, "What is shown?"]),
            ("assistant", "Two images."),
            ("user", "Which is larger?"),
            ("assistant", "None is."),
        ],
        (FIRST, SECOND),
    ),
    # HuggingFaceM4/the_cauldron
    "cauldron": Case(
        {
            "images": image(FIRST),
            "texts": [{"user": "Question: ?\nChoices:\nA. a", "assistant": "Answer: A",
                       "source": "AI2D"}],
        },
        [("user", [IMAGE, "Question: ?\nChoices:\nA. a"]), ("assistant", "Answer: A")],
        (FIRST,),
    ),
    # HuggingFaceM4/VQAv2
    "vqa": Case(
        {
            "question_type": "what is this",
            "multiple_choice_answer": "net",
            "answers": [
                {"answer": "netting", "answer_confidence": "yes", "answer_id": 1},
                {"answer": "net", "answer_confidence": "yes", "answer_id": 2},
                {"answer": "net", "answer_confidence": "maybe", "answer_id": 3},
            ],
            "image_id": 458752,
            "answer_type": "other",
            "question_id": 458752000,
            "question": "What is this photo taken looking through?",
            "image": image(FIRST)[0],
        },
        [
            ("user", [IMAGE, "What is this photo taken looking through?"]),
            ("assistant", "net"),
        ],
        (FIRST,),
    ),
    # facebook/textvqa: answers of ten people; the first of equally frequent answers is used
    "textvqa": Case(
        {"image": image(FIRST)[0], "question": "what is it?", "answers": ["nokia", "phone"]},
        [("user", [IMAGE, "what is it?"]), ("assistant", "nokia")],
        (FIRST,),
    ),
    # derek-thomas/ScienceQA
    "scienceqa": Case(
        {
            "image": image(FIRST)[0],
            "question": "Which is longer?",
            "choices": ["the red one", "the blue one"],
            "answer": 1,
            "hint": "Look at the sun.",
            "task": "closed choice",
            "lecture": "Long things are long.",
            "solution": "",
        },
        [
            (
                "user",
                [
                    IMAGE,
                    "Context: Look at the sun.\nWhich is longer?\nA. the red one\n"
                    f"B. the blue one\n{CHOOSE}",
                ],
            ),
            ("assistant", "B"),
        ],
        (FIRST,),
    ),
    # HuggingFaceM4/A-OKVQA
    "aokvqa": Case(
        {
            "image": image(FIRST)[0],
            "question_id": "22MexNkBPpdZGX6sxbxVBH",
            "question": "What is he?",
            "choices": ["skier", "mover", "driver", "umpire"],
            "correct_choice_idx": 2,
            "direct_answers": "['ski instructor', 'bellhop']",
            "rationales": ["A train would not be on the street."],
        },
        [
            (
                "user",
                [
                    IMAGE,
                    f"What is he?\nA. skier\nB. mover\nC. driver\nD. umpire\n{CHOOSE}",
                ],
            ),
            ("assistant", "C"),
        ],
        (FIRST,),
    ),
    # lmms-lab/ai2d: the index of the choice is a string
    "ai2d": Case(
        {
            "question": "What is E?",
            "options": ["stem", "leaf"],
            "answer": "1",
            "image": image(FIRST)[0],
        },
        [("user", [IMAGE, f"What is E?\nA. stem\nB. leaf\n{CHOOSE}"]), ("assistant", "B")],
        (FIRST,),
    ),
    # trl-lib/llava-instruct-mix
    "trl_prompt_completion": Case(
        {
            "images": image(FIRST),
            "prompt": [turn("user", "What are the colors of the bus in the image?")],
            "completion": [turn("assistant", "The bus in the image is white and red.")],
        },
        [
            ("user", [IMAGE, "What are the colors of the bus in the image?"]),
            ("assistant", "The bus in the image is white and red."),
        ],
        (FIRST,),
    ),
    # HuggingFaceH4/llava-instruct-mix-vsft
    "hf_parts": Case(
        {
            "messages": [
                turn("user", [
                    {"index": None, "text": "What is it?\n", "type": "text"},
                    {"index": 0, "text": None, "type": "image"},
                ]),
                turn("assistant", [{"index": None, "text": "A bus.", "type": "text"}]),
            ],
            "images": image(FIRST),
        },
        [("user", ["What is it?\n", IMAGE]), ("assistant", "A bus.")],
        (FIRST,),
    ),
    # transformers, chat_templating_multimodal: content parts contain paths of files
    "hf_inline": Case(
        {
            "messages": [
                turn("system", [{"type": "text", "text": "Be brief."}]),
                turn("user", [
                    {"type": "image", "path": FIRST},
                    {"type": "image", "image": SECOND},
                    {"type": "text", "text": "Which?"},
                ]),
                turn("assistant", [{"type": "text", "text": "The first."}]),
            ]
        },
        [
            ("system", "Be brief."),
            ("user", [IMAGE, IMAGE, "Which?"]),
            ("assistant", "The first."),
        ],
        (FIRST, SECOND),
    ),
    # Qwen2-VL, README: content parts without a type, with paths of files
    "qwen": Case(
        {
            "messages": [
                turn("user", [{"image": FIRST}, {"text": "Describe this image."}]),
                turn("assistant", "A bus."),
            ]
        },
        [("user", [IMAGE, "Describe this image."]), ("assistant", "A bus.")],
        (FIRST,),
    ),
    # OpenAI, vision fine-tuning guide
    "openai": Case(
        {
            "messages": [
                turn("system", "You are an assistant."),
                turn("user", "What is this?"),
                turn("user", [
                    {"type": "image_url", "image_url": {"url": DATA_ADDRESS, "detail": "low"}}
                ]),
                turn("assistant", "Danish"),
            ]
        },
        [
            ("system", "You are an assistant."),
            ("user", "What is this?"),
            ("user", [IMAGE]),
            ("assistant", "Danish"),
        ],
        (FIRST,),
    ),
    # Anthropic, Messages API: the system prompt is outside of the messages
    "anthropic": Case(
        {
            "system": "Be brief.",
            "messages": [
                turn("user", [
                    {"type": "image", "source": {
                        "type": "base64", "media_type": "image/png",
                        "data": DATA_ADDRESS.partition(",")[2],
                    }},
                    {"type": "text", "text": "What is in this image?"},
                ]),
                turn("assistant", [{"type": "text", "text": "A bus."}]),
            ],
        },
        [
            ("system", "Be brief."),
            ("user", [IMAGE, "What is in this image?"]),
            ("assistant", "A bus."),
        ],
        (FIRST,),
    ),
}  # fmt: skip


def torchmm_record(case: Case) -> dict[str, Any]:
    """Return the same content in the format of torchmm: content parts, and files in columns."""
    messages = []
    for role, content in case.turns:
        parts = content if isinstance(content, list) else [content]
        written = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
        ]
        messages.append(turn(role, written))
    return {"images": list(case.images), "messages": messages}
