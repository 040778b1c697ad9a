"""An agent that multiplies with a tool.

It is written without MegaRL: the official package finds base URL and key in the environment.
"""

import ast
import operator
import os
import sys

from anthropic import Anthropic

FUNCTIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {"name": "calculate", "description": "integer arithmetic", "input_schema": PARAMETERS}


def calculate(expression: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in FUNCTIONS:
            return FUNCTIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError("not arithmetic")

    return value(ast.parse(expression[:50], mode="eval").body)


client, model = Anthropic(), os.environ.get("MODEL", "policy")
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    with client.messages.stream(
        model=model, max_tokens=64, messages=messages, tools=[TOOL]
    ) as stream:
        answer = stream.get_final_message()
    messages.append(
        {
            "role": "assistant",
            "content": [
                block.model_dump(include={"type", "text", "id", "name", "input"})
                for block in answer.content
            ],
        }
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        try:
            result = str(calculate(call.input["expression"]))
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            result = f"error: {type(error).__name__}"
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in answer.content if block.type == "text"))
