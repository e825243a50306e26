"""TensorDicts whose tensors are decoded when they are read: packed rollouts, and steps of a replay storage.

A view is described by a *placeholder*: a tensor on the meta device, which has a shape, strides and an offset, but no
memory. Whatever makes a view of a tensor makes a view of its placeholder, so torch itself keeps track of what a view
shows. What is read and written is up to the `slipstream.lazy.tensor.Source` of the tensor.
"""
