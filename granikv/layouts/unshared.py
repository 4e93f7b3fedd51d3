"""The control: every request holds a copy of its whole prefix, as an engine without prefix caching would."""

from granikv.layouts.base import KVLayout
from granikv.view import Trait


class UnsharedLayout(KVLayout):
    """Pages like PagedLayout, but a fork copies all of its parent's tokens, so no level is shared."""

    provides = Trait.ONE_POOL

    def _unshared_tokens(self, own_len: int) -> int:
        return own_len
