from tests.e2e.keys import base
from tests.e2e.shop import shop
from tests.e2e.user import user
from tests.support.runs import lab

__all__ = ["base", "lab", "shop", "user"]
