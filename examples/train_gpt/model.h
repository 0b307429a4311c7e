#pragma once

#include <cmath>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

/// One operator, as in Python. The forward of torch::nn::Linear multiplies first and adds the bias afterwards, which
/// rounds differently.
inline torch::Tensor linear(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

/// The model of benchmarks/peers/gpt_fsdp2.py: same modules, same names, same arithmetic.
struct BlockImpl : torch::nn::Module {
  int64_t heads;
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};

  BlockImpl(int64_t dim, int64_t heads) : heads(heads) {
    using namespace torch::nn;
    ln1 = register_module("ln1", LayerNorm(LayerNormOptions({dim})));
    qkv = register_module("qkv", Linear(dim, 3 * dim));
    proj = register_module("proj", Linear(dim, dim));
    ln2 = register_module("ln2", LayerNorm(LayerNormOptions({dim})));
    fc = register_module("fc", Linear(dim, 4 * dim));
    out = register_module("out", Linear(4 * dim, dim));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    auto split = linear(qkv, ln1(x)).view({b, t, 3, heads, d / heads}).permute({2, 0, 3, 1, 4});
    auto a = torch::scaled_dot_product_attention(split[0], split[1], split[2], {}, 0.0, /*is_causal=*/true);
    x = x + linear(proj, a.transpose(1, 2).reshape({b, t, d}));
    return x + linear(out, torch::gelu(linear(fc, ln2(x))));
  }
};
FSDP_MODULE(Block);

struct GptImpl : torch::nn::Module {
  torch::nn::Embedding tok{nullptr}, pos{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm ln_f{nullptr};
  torch::nn::Linear head{nullptr};

  GptImpl(int64_t vocab, int64_t length, int64_t dim, int64_t heads, int64_t layers) {
    using namespace torch::nn;
    tok = register_module("tok", Embedding(vocab, dim));
    pos = register_module("pos", Embedding(length, dim));
    blocks = register_module("blocks", ModuleList());
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block(dim, heads));
    ln_f = register_module("ln_f", LayerNorm(LayerNormOptions({dim})));
    head = register_module("head", Linear(LinearOptions(dim, vocab).bias(false)));
  }

  torch::Tensor forward(torch::Tensor ids) {
    auto x = tok(ids) + pos(torch::arange(ids.size(1), ids.device()));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return linear(head, ln_f(x));
  }
};
FSDP_MODULE(Gpt);

inline torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat).flatten(0, 1), targets.flatten());
}

/// Everything fsdp needs to know about this model: each block is a unit, and the root takes the rest.
inline void shard(Gpt& model, fsdp::FsdpContext& context, const fsdp::DeviceMesh& mesh, const std::string& strategy,
                  torch::ScalarType compute) {
  const auto placements = strategy == "ddp"     ? fsdp::ddp("dp")
                          : strategy == "zero1" ? fsdp::zero1("dp")
                          : strategy == "zero2" ? fsdp::zero2("dp")
                                                : fsdp::zero3("dp");
  fsdp::MixedPrecisionPolicy precision;
  precision.param_dtype = compute;
  precision.main_grads_dtype = torch::kFloat;
  auto scope = fsdp::fully_shard_context(context);
  for (auto& block : *model->blocks) fsdp::fully_shard(*block, mesh, placements, precision);
  fsdp::fully_shard(model, mesh, placements, precision);
}
