"""What a program tells about itself: spans around its work, and meters that count it."""

from monarch._base.meters import METER, Counter, Histogram, Meter, MeterProvider, UpDownCounter, get_meter
from monarch._base.spans import span, traced

__all__ = [
    "METER",
    "Counter",
    "Histogram",
    "Meter",
    "MeterProvider",
    "UpDownCounter",
    "get_meter",
    "span",
    "traced",
]
