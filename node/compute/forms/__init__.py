"""Small forms of tensors: pure functions of a tensor and the task it belongs to, with the same bits on every machine.

`q8` for what crosses a boundary, `gi` (in `grid` and `packed`) for weight gradients, `p12` for parameters.
Every decoder takes any bytes and either gives a tensor of the announced shape or raises `RemoteProtocolError`.
"""
