"""Chat templates like those of well-known models, and a tokenizer for each."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_QWEN_TOOLS = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
QWEN_ARGUMENTS = """\
{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"""
_QWEN_CALLS = (
    """\
{%- for c in m.tool_calls %}{% set f = c.function %}
{%- if not loop.first or m.content %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ f.name }}", "arguments": """
    + QWEN_ARGUMENTS
    + """}
</tool_call>{% endfor %}"""
)
_QWEN_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}"""

# Tools in the system turn, results in a user turn.
QWEN25 = (
    _QWEN_TOOLS
    + """\
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{{ m.content }}"""
    + _QWEN_CALLS
    + """<|im_end|>
{% elif m.role == 'tool' %}"""
    + _QWEN_RESULTS
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

# Thoughts, also those in contents, of answers after the last question only.
QWEN3 = (
    _QWEN_TOOLS
    + """\
{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' -%}
{%- set content = m.content %}{% set thoughts = '' %}
{%- if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}
{%- elif '</think>' in m.content %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thoughts = m.content.split('</think>')[0].split('<think>')[-1] %}{% endif -%}
<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thoughts) -%}
<think>
{{ thoughts.strip('\\n') }}
</think>

{{ content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}"""
    + _QWEN_CALLS
    + """<|im_end|>
{% elif m.role == 'tool' %}"""
    + _QWEN_RESULTS
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

# Trims contents; one call per turn, without content; results as JSON.
LLAMA3 = """\
{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

Tools:
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}
{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('one call at a time') }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}",
{{- '' }} "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# No prompt for answers; ids of nine characters are part of the text.
MISTRAL = """\
{{ bos_token }}{% set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif -%}
[INST] {{ m.content }} [/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('id of 9 characters') }}{% endif %}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""

# No system turn; roles have other names.
GEMMA = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Generation tags around complete turns, including their headers.
SMOLLM3 = """\
{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant
{{ m.content.lstrip('\\n') }}<|im_end|>
{% endgeneration %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Generation tags around the content of the assistant.
TAGGED = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"""
TAGGED += (
    _QWEN_CALLS
    + """<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

# Arguments must be text; the tool's name is in the header of its result, with schemas as types.
HARMONY = """\
{% if tools %}<|start|>developer<|message|>{% for tool in tools %}// {{ tool.function.description }}
type {{ tool.function.name }} = ({% for name, p in tool.function.parameters.properties.items() %}
{{ name }}{% if name not in (tool.function.parameters.required or []) %}?{% endif %}: {{ p.type }}
{%- if p.default is defined %} = {{ p.default }}{% endif %} // {{ p.description }}{% endfor %})
{%- endfor %}<|end|>{% endif %}
{%- set ns = namespace(name='') %}
{%- for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.tool_calls %}
{%- set ns.name = m.tool_calls[0].function.name -%}
<|start|>assistant<|channel|>to={{ ns.name }}<|message|>
{{- '' + m.tool_calls[0].function.arguments }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- elif m.role == 'tool' %}<|start|>{{ ns.name }} to=assistant<|message|>
{{- m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# An end token of the chat after the end token of the last answer.
PHI35 = """\
{% for m in messages %}{% if m.role == 'assistant' -%}
{{ '<|assistant|>\n' }}{#begin +#}{{ m.content + '<|end|>' }}{#end +#}{{ '\n' }}
{%- else -%}
{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# No end token: the next role ends an answer. Thoughts of answers after the last question only.
GLM46 = """\
[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{% for m in messages %}{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>{#begin +#}
{%- if messages.index(m) > ns.last and m.reasoning_content is string %}
{{- '\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else %}{{ '\n<think></think>' }}{% endif -%}
{{ '\n' + m.content.strip() if m.content.strip() else '' }}{#end +#}
{%- else -%}<|{{ m.role }}|>
{{ m.content }}{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}
{%- endif %}"""

# The end token of the last answer differs from that of earlier answers.
GPT_OSS = """\
<|start|>system<|message|>You are helpful.<|end|>
{%- for m in messages %}{% if m.role == 'assistant' -%}
<|start|>assistant{#begin +#}<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{#end +#}
{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Two tokens end an answer.
COMMAND_A = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' -%}
<|start|><|assistant|>{#begin +#}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN|>
{#- -#}{#end +#}
{%- else -%}<|start|><|{{ m.role }}|>{{ m.content }}<|END_OF_TURN|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|><|assistant|>{% endif %}"""

# No prompt for questions or line feeds.
DEEPSEEK = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' -%}
<|assistant|>{#begin +#}{{ m.content }}{{ eos_token }}{#end +#}
{%- elif m.role == 'user' -%}<|user|>{{ m.content }}
{%- else -%}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "smollm3": SMOLLM3,
    "tagged": TAGGED,
    "harmony": HARMONY,
    "phi3.5": PHI35,
    "glm4.6": GLM46,
    "gpt-oss": GPT_OSS,
    "command-a": COMMAND_A,
    "deepseek": DEEPSEEK,
}
TAGS = {"{#begin +#}": "{% generation +%}", "{#end +#}": "{% endgeneration +%}"}
"""Comments around an answer with its end token, and the tags that transformers reads."""
_ANSWERS = {
    "chatml": ("{{ m.content }}<|im_end|>", "m.role == 'assistant'"),
    "llama3": ("{{ m.content | trim }}<|eot_id|>", "m.role == 'assistant'"),
    "mistral": (" {{ m.content | trim }}{{ eos_token }}", "true"),
    "gemma": ("{{ m.content | trim }}<end_of_turn>", "m.role == 'assistant'"),
}
"""Answer in templates without these comments, and the condition for an answer."""


def with_generation_tags(name: str) -> str:
    """Return a template with `{% generation %}` tags around answers and their end tokens."""
    template = TEMPLATES[name]
    if name in _ANSWERS:
        answer, condition = _ANSWERS[name]
        assert answer in template
        tagged = f"{{% if {condition} +%}}{{#begin +#}}{answer}{{#end +#}}{{% else +%}}{answer}"
        template = template.replace(answer, tagged + "{% endif +%}")
    for comment, tag in TAGS.items():
        assert comment in template
        template = template.replace(comment, tag)
    return template


SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("<|start|>", "<|end|>", "<|call|>", "<|message|>", "<|channel|>", "<|return|>"),
    *("[gMASK]", "<sop>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN|>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")


def with_template(base: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with all special tokens of these templates and with one template."""
    backend = Tokenizer.from_str(base.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
