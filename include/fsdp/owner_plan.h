#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <fsdp/layout.h>

/// Chooses the owners of TensorAtomic tensors: which rank holds, and works on, which whole tensor. Plan all tensors of
/// all units of a context in one call, so that the ranks' total work is even. Pure C++: the result depends on the
/// arguments only, so every rank computes the same one.
namespace fsdp {

/// Work that a tensor makes for its owner, in any unit: at least 0.
using OwnerCost = std::function<int64_t(const Shape&)>;

/// Elements: memory, and the work of element-wise optimizers. ValueError: a negative dimension, overflow.
int64_t element_cost(const Shape& shape);

/// Multiplications of one Newton-Schulz step of Muon, as a matrix of shape[0] rows: with r the smaller and c the larger
/// side, 2 r r c + r r r. Tensors that are no matrices (fewer than two dimensions) cost their elements. ValueError: as
/// element_cost.
int64_t newton_schulz_cost(const Shape& shape);

/// Longest first: the costliest tensor that is left goes to the rank with the least cost so far, the lowest among
/// equals; tensors of equal cost in list order. Where that does not reach the lower bound, also to the rank that has
/// the most and still stays within a limit, for several limits; the smaller maximum wins. One owner in [0, dp_size) per
/// tensor; at most 4/3 of the best possible maximum. ValueError: dp_size < 1, a negative cost (names the tensor), a
/// total beyond 64 bits.
std::vector<int64_t> assign_owners(std::span<const int64_t> costs, int64_t dp_size);
std::vector<int64_t> assign_owners(std::span<const Shape> shapes, int64_t dp_size,
                                   const OwnerCost& cost = element_cost);

/// Total cost per rank. ValueError: lists of different lengths, an owner outside [0, dp_size).
std::vector<int64_t> owner_loads(std::span<const int64_t> costs, std::span<const int64_t> owners, int64_t dp_size);

/// No assignment has a smaller maximum load: the mean, the costliest tensor, and for every k the k + 1 cheapest of the
/// k x dp_size + 1 costliest tensors, of which one rank must take k + 1.
int64_t owner_load_lower_bound(std::span<const int64_t> costs, int64_t dp_size);

}  // namespace fsdp
