from tests.support.runs import lab

__all__ = ["lab"]
