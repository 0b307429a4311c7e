#include "zoo/model_zoo.h"

namespace fsdp::zoo {

namespace {

using Shapes = std::vector<Shape>;

void add(Shapes& to, const Shapes& more) { to.insert(to.end(), more.begin(), more.end()); }

Shapes linear_with_bias(int64_t out, int64_t in) { return {{out, in}, {out}}; }
/// Weight and bias of a layer norm, or of a batch norm.
Shapes norm(int64_t width) { return {{width}, {width}}; }

Model gpt2_xl() {
  const int64_t d = 1600;
  Shapes block = norm(d);
  add(block, linear_with_bias(3 * d, d));
  add(block, linear_with_bias(d, d));
  add(block, norm(d));
  add(block, linear_with_bias(4 * d, d));
  add(block, linear_with_bias(d, 4 * d));
  // The head is the embedding.
  Shapes rest{{50257, d}, {1024, d}};
  add(rest, norm(d));
  return {
      "GPT-2 XL",
      "config.json of huggingface.co/openai-community/gpt2-xl (matrices as Linear [out, in]); as in nanoGPT's model.py",
      {{"embedding and norm", 1, false, rest, true}, {"block", 48, true, block}}};
}

Model llama3(const std::string& size, int64_t layers, int64_t d, int64_t ffn) {
  const int64_t kv = 8 * 128;
  const Shapes block{{d}, {d, d}, {kv, d}, {kv, d}, {d, d}, {d}, {ffn, d}, {ffn, d}, {d, ffn}};
  return {"Llama-3 " + size,
          "config.json of huggingface.co/meta-llama/Llama-3.1-" + size + "; as in litgpt's config.py",
          {{"embedding", 1, false, {{128256, d}}},
           {"block", layers, true, block},
           {"norm and head", 1, false, {{d}, {128256, d}}}}};
}

Shapes swiglu(int64_t d, int64_t ffn) { return {{ffn, d}, {ffn, d}, {d, ffn}}; }

Model mixtral_8x22b() {
  const int64_t d = 6144, kv = 8 * 128;
  Shapes block{{d}, {d, d}, {kv, d}, {kv, d}, {d, d}, {d}, {8, d}};
  for (int expert = 0; expert < 8; ++expert) add(block, swiglu(d, 16384));
  return {"Mixtral 8x22B",
          "config.json of huggingface.co/mistral-community/Mixtral-8x22B-v0.1; as in litgpt's config.py, but for the "
          "vocabulary, which there is the instruct model's 32768",
          {{"embedding", 1, false, {{32000, d}}},
           {"block", 56, true, block},
           {"norm and head", 1, false, {{d}, {32000, d}}}}};
}

Model deepseek_v3() {
  const int64_t d = 7168, heads = 128, q_rank = 1536, kv_rank = 512;
  const Shapes attention{{d},
                         {q_rank, d},
                         {q_rank},
                         {heads * (128 + 64), q_rank},
                         {kv_rank + 64, d},
                         {kv_rank},
                         {heads * (128 + 128), kv_rank},
                         {d, heads * 128},
                         {d}};
  Shapes dense = attention, moe = attention;
  add(dense, swiglu(d, 18432));
  add(moe, {{256, d}, {256}});
  for (int expert = 0; expert < 256 + 1; ++expert) add(moe, swiglu(d, 2048));
  return {"DeepSeek-V3",
          "config.json of huggingface.co/deepseek-ai/DeepSeek-V3 and inference/model.py of its GitHub repository, "
          "without the "
          "prediction layer",
          {{"embedding", 1, false, {{129280, d}}},
           {"dense block", 3, true, dense},
           {"expert block", 58, true, moe},
           {"norm and head", 1, false, {{d}, {129280, d}}}}};
}

Model qwen3_235b() {
  const int64_t d = 4096, q = 64 * 128, kv = 4 * 128;
  Shapes block{{d}, {q, d}, {kv, d}, {kv, d}, {d, q}, {128}, {128}, {d}, {128, d}};
  for (int expert = 0; expert < 128; ++expert) add(block, swiglu(d, 1536));
  return {"Qwen3-235B-A22B",
          "config.json of huggingface.co/Qwen/Qwen3-235B-A22B; as in litgpt's config.py",
          {{"embedding", 1, false, {{151936, d}}},
           {"block", 94, true, block},
           {"norm and head", 1, false, {{d}, {151936, d}}}}};
}

Shapes conv_with_norm(int64_t out, int64_t in, int64_t kernel) {
  Shapes s{{out, in, kernel, kernel}};
  add(s, norm(out));
  return s;
}

Shapes bottleneck(int64_t in, int64_t width, bool downsample) {
  Shapes s = conv_with_norm(width, in, 1);
  add(s, conv_with_norm(width, width, 3));
  add(s, conv_with_norm(4 * width, width, 1));
  if (downsample) add(s, conv_with_norm(4 * width, in, 1));
  return s;
}

Model resnet50() {
  Model m{"ResNet-50", "torchvision.models.resnet50", {{"stem", 1, false, conv_with_norm(64, 3, 7)}}};
  const int64_t repeats[] = {3, 4, 6, 3};
  int64_t in = 64;
  for (int64_t stage = 0; stage < 4; ++stage) {
    const int64_t width = int64_t{64} << stage;
    const std::string name = "layer" + std::to_string(stage + 1);
    m.units.push_back({name + ".0", 1, false, bottleneck(in, width, true)});
    in = 4 * width;
    m.units.push_back({name + ".1", repeats[stage] - 1, false, bottleneck(in, width, false)});
  }
  m.units.push_back({"fc", 1, false, linear_with_bias(1000, 2048)});
  return m;
}

/// Query, key (which has no bias), value and output, with the norm before them.
Shapes whisper_attention(int64_t d) {
  Shapes s = norm(d);
  add(s, {{d, d}, {d}, {d, d}, {d, d}, {d}, {d, d}, {d}});
  return s;
}

Model whisper_large() {
  const int64_t d = 1280;
  Shapes mlp = norm(d);
  add(mlp, linear_with_bias(4 * d, d));
  add(mlp, linear_with_bias(d, 4 * d));
  Shapes encoder = whisper_attention(d), decoder = whisper_attention(d);
  add(decoder, whisper_attention(d));
  add(encoder, mlp);
  add(decoder, mlp);
  Shapes audio{{d, 80, 3}, {d}, {d, d, 3}, {d}};
  add(audio, norm(d));
  // The head is the token embedding; the encoder's positions are not learnt.
  Shapes text{{51865, d}, {448, d}};
  add(text, norm(d));
  return {"Whisper-large",
          "ModelDimensions of large-v2 and whisper/model.py in github.com/openai/whisper",
          {{"embedding and norm", 1, false, text, true},
           {"audio convolutions and norm", 1, false, audio},
           {"encoder block", 32, true, encoder},
           {"decoder block", 32, true, decoder}}};
}

}  // namespace

const std::vector<Model>& models() {
  static const std::vector<Model> kModels{gpt2_xl(),
                                          llama3("8B", 32, 4096, 14336),
                                          llama3("70B", 80, 8192, 28672),
                                          llama3("405B", 126, 16384, 53248),
                                          mixtral_8x22b(),
                                          deepseek_v3(),
                                          qwen3_235b(),
                                          resnet50(),
                                          whisper_large()};
  return kModels;
}

}  // namespace fsdp::zoo
