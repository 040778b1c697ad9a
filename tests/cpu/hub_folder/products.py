"""An environment of OpenEnv with MCP tools: products of three-digit numbers, with a calculator."""

import ast
import operator
import random

from fastmcp import FastMCP
from fastmcp.tools.tool import ToolResult
from fastmcp.utilities.types import Image
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Answer(Observation):
    error: str = ""


FUNCTIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Question(Observation):
    question: str


def value_of(node):
    if isinstance(node, ast.BinOp) and type(node.op) in FUNCTIONS:
        return FUNCTIONS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("not arithmetic")


class Products(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("products")

        @tools.tool
        def calculate(expression: str) -> str:
            """Integer arithmetic."""
            try:
                return str(value_of(ast.parse(expression[:50], mode="eval").body))
            except SyntaxError:
                raise ValueError("not arithmetic") from None

        @tools.tool
        def answer(number: str) -> str:
            """The final answer, which ends the episode."""
            self.answer = number
            return "thank you"

        @tools.tool
        def picture() -> Image:
            """Shows nothing that can be read."""
            return Image(data=b"no picture", format="png")

        @tools.tool
        def fields() -> ToolResult:
            """What it says is no text."""
            result = ToolResult(structured_content={"number": 7})
            result.content = []
            return result

        @tools.tool
        def own() -> str:
            """The environment answers by an observation of its own."""
            self.own = True
            return ""

        super().__init__(tools)
        self.own = False
        self.product = 0
        self.answer = None
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        numbers = random.Random(seed)
        first = numbers.randint(100, 999)
        second = numbers.randint(100, 999)
        self.product = first * second
        self.answer = None
        self._state = State(episode_id=episode_id)
        return Question(question=f"{first}*{second}=")

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        self._state.step_count += 1
        if self.own:
            return Answer(error="not that way", reward=0.5)
        if isinstance(action, CallToolAction):
            observation.done = self.answer is not None
            observation.reward = float(self.answer == str(self.product))
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise TypeError(f"{type(action).__name__} is no action of this environment")

    @property
    def state(self):
        return self._state


app = create_app(
    Products, CallToolAction, CallToolObservation, env_name="products", max_concurrent_envs=256
)
