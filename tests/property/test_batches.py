"""Any step that an engine may hand over comes out as the formula says, and leaves the cache as it must."""

from drawn_batches import DrawnBatch, batches, check
from hypothesis import HealthCheck, given, settings


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=batches())
def test_drawn_step_equals_the_formula(drawn: DrawnBatch) -> None:
    check(drawn)
