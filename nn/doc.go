// Package nn has the layers of a transformer as fused, differentiable
// gorgonia operations. They say what is computed, not how: each describes
// itself to an engine through DeviceOp, and its Do is a plain reference for
// float32 and float64 that any gorgonia machine can run.
//
// Activations are matrices (N, D), row major: N = B·T rows for B sequences of
// T positions. Weights have Hugging Face's Conv1D layout (in, out), biases
// and gains are vectors. Indices are vectors of tensor.Int.
//
// Every function checks shapes and types and names the node at fault. In a
// backward pass a layer's parameter gradients come before the gradient of its
// input, in the order of node IDs, so that they can travel while the layer
// below is still being differentiated. Gradients are not differentiable again.
package nn
