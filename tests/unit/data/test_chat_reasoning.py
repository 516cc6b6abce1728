"""Reasoning in the content of answers, and text that chat templates write for the model."""

import pytest
from chat_templates import TEMPLATES, with_template

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.chat import ChatTemplate
from torchmm.data.record_formats.chat_types import Turn, split_reasoning
from torchmm.data.record_formats.messages import messages_to_conversation
from torchmm.data.record_formats.sample import SampleOptions, TextSegment

EMPTY = "<think>\n\n</think>\n\n"
QUESTION = {"role": "user", "content": "two"}


def answer(content="", **keys):
    return {"role": "assistant", "content": content, **keys}


@pytest.fixture
def render(tokenizer):
    """Return the text of a chat, and its text in the loss."""

    def rendered(template, messages, **options):
        used = with_template(tokenizer, TEMPLATES[template])
        sample = ChatTemplate(used)(
            messages_to_conversation(messages, {}), SampleOptions(**options)
        )
        texts = [s for s in sample.segments if isinstance(s, TextSegment)]
        return "".join(s.text for s in texts), "".join(s.text for s in texts if s.loss)

    return rendered


@pytest.mark.parametrize("template", ["qwen3", "glm4.6"])
def test_empty_reasoning_block_is_masked_by_default(render, template):
    text, loss = render(template, [QUESTION, answer("red")])
    assert "<think>" in text
    assert "think" not in loss and loss.strip().startswith("red")


@pytest.mark.parametrize("template", ["qwen3", "glm4.6"])
@pytest.mark.parametrize("options", [{"train_template_prefix": True}, {"train_on": "all"}])
def test_empty_reasoning_block_is_trained_on_request(render, template, options):
    _, loss = render(template, [QUESTION, answer("red")], **options)
    assert "<think>" in loss and "</think>" in loss


def test_empty_reasoning_block_before_tool_calls_is_masked(render):
    calls = [{"function": {"name": "f", "arguments": {}}}]
    text, loss = render("qwen3", [QUESTION, answer(tool_calls=calls)])
    if EMPTY in text:
        assert "think" not in loss
    assert loss.startswith("<tool_call>")


def test_channel_of_an_answer_stays_in_the_loss(render):
    _, loss = render("harmony", [QUESTION, answer("red")])
    assert loss.startswith("<|channel|>final<|message|>red")


def test_role_header_inside_generation_tags_is_masked(render):
    _, loss = render("smollm3", [QUESTION, answer("red")])
    assert loss.startswith("red")
    _, loss = render("smollm3", [QUESTION, answer("red")], train_template_prefix=True)
    assert loss.startswith("<|im_start|>assistant")


@pytest.mark.parametrize("content", ["<think>why</think>red", "<think>\nwhy\n</think>\n\nred",
                                     "why</think>red", "  <think>why</think>red"])  # fmt: skip
@pytest.mark.parametrize("template", ["qwen3", "glm4.6", "harmony", "tagged"])
def test_reasoning_in_content_equals_reasoning_content(render, template, content):
    inside = render(template, [QUESTION, answer(content)])
    assert inside == render(template, [QUESTION, answer("red", reasoning_content="why")])
    assert "why" in inside[1]


def test_reasoning_in_content_stays_text_for_other_templates(render):
    _, loss = render("chatml", [QUESTION, answer("<think>why</think>red")])
    assert loss.startswith("<think>why</think>red")


@pytest.mark.parametrize("first", [answer("red", reasoning_content="why"),
                                   answer("<think>why</think>red")])  # fmt: skip
def test_reasoning_of_earlier_turns_follows_the_template(render, first):
    second = {"role": "user", "content": "dogs"}
    messages = [QUESTION, first, second, answer("<think>because</think>blue")]
    text, loss = render("qwen3", messages)
    assert "why" not in text and "because" in loss
    assert "red" in loss and "blue" in loss
    text, loss = render("tagged", messages)
    assert "why" in loss and "because" in loss


def test_reasoning_of_the_last_turn_must_be_written(render):
    with pytest.raises(CorruptSampleError, match="omits reasoning_content of message 2"):
        render("chatml", [QUESTION, answer("red", reasoning_content="why")])


@pytest.mark.parametrize(
    "content",
    ["red", "<think>why", "<think>why</think>", "a<think>why</think>red", "x</think>y</think>z"],
)
def test_split_reasoning_leaves_other_contents(content):
    turn = Turn("assistant", (content,))
    assert split_reasoning(turn) is turn


def test_blank_reasoning_is_removed():
    turn = split_reasoning(Turn("assistant", ("<think>\n\n</think>\n\nred",)))
    assert turn == Turn("assistant", ("red",))


def test_tool_calls_continue_the_text_before_them():
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    separate = [QUESTION, answer("Let me see."), answer(tool_calls=calls)]
    joined = [QUESTION, answer("Let me see.", tool_calls=calls)]
    assert messages_to_conversation(separate, {}) == messages_to_conversation(joined, {})
    flagged = [QUESTION, answer("Let me see.", train=False), answer(tool_calls=calls)]
    assert len(messages_to_conversation(flagged, {}).turns) == 3
