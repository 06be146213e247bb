"""Chat templates with tools, as models of each format have them, and a call as they write it."""

from __future__ import annotations

from personalpeft.types import ToolFormat

# A template of the kind that the Hermes and Qwen families have.
HERMES = """
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\nReturn <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
# As Llama 3.2's: tools in the user's message, and calls without marks.
LLAMA3 = """
{%- for message in messages %}
{{- '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\n\n' }}
{%- if loop.first and tools %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary}.\n\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{% endif %}
"""
# As Phi-4 mini's: tools in the system message, and no calls.
PHI4_MINI = """
{%- for message in messages %}
{%- if message.role == 'system' and 'tools' in message and message.tools is not none %}
{{- '<|im_start|>system\n' + message.content + '<|tool|>' + message.tools + '<|/tool|><|im_end|>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
TEMPLATES = {
    ToolFormat.HERMES: HERMES,
    ToolFormat.LLAMA3_JSON: LLAMA3,
    ToolFormat.PHI4_MINI: PHI4_MINI,
}
CALLS = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>',
    ToolFormat.LLAMA3_JSON: '{"name": "f", "parameters": {"x": [1]}}',
    ToolFormat.PHI4_MINI: '<|tool_call|>[{"name": "f", "arguments": {"x": [1]}}]<|/tool_call|>',
}
