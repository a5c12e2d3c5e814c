"""A real server under a mixed load for as long as asked: no error, no growth, the tokens of requests served alone."""
