"""Small chat templates in the style of each family of models."""

# ruff: noqa: E501

HERMES = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{%- if message.content %}
{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA = """\
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("only single tool-calls") }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|h|>assistant<|/h|>
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == "tool" %}<|h|>ipython<|/h|>{{ message.content | tojson }}<|eot_id|>
{%- else %}<|h|>{{ message.role }}<|/h|>{{ message.content | trim }}
{%- if tools and loop.last %} {% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|h|>assistant<|/h|>{% endif %}"""
MISTRAL = """\
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- endfor %}]</s>
{%- elif message.role == "tool" %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %} {{ message.content }}</s>
{%- endif %}
{%- endfor %}"""
MISTRAL_NAMED = MISTRAL.replace(
    "[TOOL_CALLS] [", "[TOOL_CALLS]{{ message.tool_calls[0].function.name }}[ARGS]"
)
GEMMA_FUNCTIONS = """\
{%- for tool in tools or [] %}<start_function_declaration>declaration:{{ tool.function.name }}{% endfor %}
{%- for message in messages %}<start_of_turn>{{ message.role }}
{%- for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}{}<end_function_call>{% endfor %}
{%- if message.role == "tool" %}<start_function_response>response:{{ message.name }}{% endif %}{{ message.content or "" }}<end_of_turn>
{%- endfor %}"""
GEMMA = """\
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content | trim }}<end_of_turn>
{%- endfor %}"""
PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-named": MISTRAL_NAMED,
    "gemma-functions": GEMMA_FUNCTIONS,
    "gemma": GEMMA,
    "plain": PLAIN,
}

# A call of weather and, if the family has parallel calls, one of now, in each family's format.
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral-named": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
    "gemma-functions": "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "gemma": '```json\n[{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]\n```',
    "plain": '{"name": "weather", "arguments": {"city": "Oslo"}}\n{"name": "now", "arguments": {}}',
}
