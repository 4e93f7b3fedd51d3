"""Paged KV (PagedAttention, Kwon et al., SOSP 2023): tokens in fixed-size pages, whole pages shared by forks."""

from granikv.layouts.base import KVLayout


class PagedLayout(KVLayout):
    """Pages of `page_size` tokens from one shuffled free list. page_size 1 is SGLang's token pool."""
