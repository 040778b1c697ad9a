"""The server of a tool; verifiers starts this module as a program."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds."""
        return str(a + b)


if __name__ == "__main__":
    Calculator.run()
