"""What both sides of the queue must agree on about images and videos: limits, sizes, tokens, and how a file begins."""
