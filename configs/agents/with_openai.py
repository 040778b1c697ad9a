"""An agent that multiplies with a tool.

It is written without MegaRL: the official package finds base URL and key in the environment.
"""

import ast
import json
import operator
import os
import sys

from openai import OpenAI

FUNCTIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "integer arithmetic",
        "parameters": PARAMETERS,
    },
}


def calculate(expression: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in FUNCTIONS:
            return FUNCTIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError("not arithmetic")

    return value(ast.parse(expression[:50], mode="eval").body)


client, model = OpenAI(), os.environ.get("MODEL", "policy")
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    answer = (
        client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        .choices[0]
        .message
    )
    messages.append(answer.model_dump(exclude_none=True))
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        try:
            result = str(calculate(json.loads(call.function.arguments)["expression"]))
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            result = f"error: {type(error).__name__}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(answer.content)
