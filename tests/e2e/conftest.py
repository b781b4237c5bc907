from tests.e2e.keys import base
from tests.e2e.shop import shop
from tests.e2e.user import user

__all__ = ["base", "shop", "user"]
