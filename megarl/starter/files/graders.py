"""The reward of run.yaml.

Its parameters say what a function needs; docs/extending.md lists all that it can ask for.
"""


def share_right(response: str, answer: str) -> dict[str, float]:
    """The share of the right totals that are in their places.

    An evaluation counts a response of score 1 as right.

    Numbers beside the score appear as reward/NAME/mean in metrics.jsonl.
    """
    expected = answer.split(",")
    actual = response.strip().split(",")
    share = sum(a == b for a, b in zip(expected, actual)) / max(len(expected), len(actual))
    return {"score": share, "all_right": response.strip() == answer}
