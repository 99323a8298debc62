"""The demonstration: bags of handwritten digits, whose true evidence anyone can see."""

from xmil.demo.digits import DigitBags, draw_bags
from xmil.demo.run import DemoResult, run_demo

__all__ = ["DemoResult", "DigitBags", "draw_bags", "run_demo"]
