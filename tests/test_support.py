"""The measuring and poisoning helpers themselves."""

import torch

from tests.support.allocations import largest_allocation, peak_new_bytes, trace_allocations


def test_largest_counts_one_storage_and_views_are_free():
    x = torch.randn(1000)
    assert largest_allocation(lambda: (x.exp()[:10].view(2, 5) * 2, x.add_(1))) == 4000


def test_peak_forgets_what_was_freed():
    x = torch.randn(1000)

    def one_after_another():
        for _ in range(5):
            x.exp()

    def all_at_once():
        return [x.exp() for _ in range(5)]

    assert peak_new_bytes(one_after_another) <= 2 * 4000
    assert peak_new_bytes(all_at_once) == 5 * 4000


def test_backward_is_seen_and_saved_tensors_count_as_kept():
    x = torch.randn(1000, requires_grad=True)
    forward = trace_allocations(lambda: x.exp().sum())
    assert 4000 <= forward.kept <= 4100
    assert peak_new_bytes(forward.result.backward) >= 4000


def test_uninitialised_memory_is_poisoned():
    x = torch.zeros(3)
    for made in (torch.empty(3), torch.empty_like(x), x.new_empty(3), torch.empty(3, dtype=torch.bfloat16)):
        assert made.isnan().all()
    assert (torch.empty(3, dtype=torch.long) > 10**6).all()
    assert torch.empty(2, requires_grad=True).requires_grad
