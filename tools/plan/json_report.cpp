#include <sstream>
#include <utility>

#include "json/text.h"
#include "plan/report.h"

namespace fsdp::plan {
namespace {

/// Writes members and items; commas and braces come by themselves.
class Writer {
 public:
  explicit Writer(std::ostream& out) : out_(out) {}

  template <class F>
  void object(F&& members) {
    nested('{', '}', members);
  }
  template <class F>
  void array(F&& items) {
    nested('[', ']', items);
  }
  Writer& key(const std::string& name) {
    item();
    out_ << json::quoted(name) << ": ";
    after_key_ = true;
    return *this;
  }
  void value(int64_t n) { item(), out_ << n; }
  void value(bool b) { item(), out_ << (b ? "true" : "false"); }
  void value(const std::string& text) { item(), out_ << json::quoted(text); }
  void value(const char* text) { value(std::string(text)); }
  void member(const std::string& name, const auto& v) { key(name).value(v); }

 private:
  template <class F>
  void nested(char open, char close, F&& body) {
    item();
    out_ << open;
    first_ = true;
    depth_ += 2;
    body();
    depth_ -= 2;
    if (!first_) out_ << '\n' << std::string(depth_, ' ');
    out_ << close;
    first_ = false;
  }
  void item() {
    if (std::exchange(after_key_, false)) return;
    if (depth_ > 0) out_ << (first_ ? "\n" : ",\n") << std::string(depth_, ' ');
    first_ = false;
  }

  std::ostream& out_;
  size_t depth_ = 0;
  bool first_ = true, after_key_ = false;
};

void write_choice(Writer& w, const Choice& c) {
  w.object([&] {
    w.member("strategy", c.strategy);
    w.key("mesh").array([&] {
      for (auto s : c.mesh.shape) w.value(s);
    });
    w.member("bytes", c.bytes);
    w.member("sent", c.sent);
    w.member("sent_outer", c.outer);
  });
}

void write_units(Writer& w, const Plan& plan) {
  w.key("units").array([&] {
    for (const auto& u : plan.units)
      w.object([&] {
        w.member("name", u.name);
        w.member("count", u.count);
        w.member("root", u.root);
        w.key("groups").array([&] {
          for (const auto& g : u.groups)
            w.object([&] {
              w.member("trainable", g.trainable);
              w.member("compute_dtype", name_of(g.compute));
              w.member("main_dtype", name_of(g.main));
              w.member("grad_dtype", name_of(g.grad));
              w.member("elements", g.layout.payload());
              w.member("padding", g.layout.size - g.layout.payload());
            });
        });
      });
  });
}

void write_fit(Writer& w, const Fit& fit) {
  w.key("fit").object([&] {
    w.member("memory", fit.memory);
    w.member("fits", fit.fits());
    w.key("same_ranks").array([&] {
      for (const auto& c : fit.same_ranks) write_choice(w, c);
    });
    if (fit.best) write_choice(w.key("best"), *fit.best);
    if (fit.more_ranks) write_choice(w.key("more_ranks"), *fit.more_ranks);
  });
}

}  // namespace

std::string as_json(const Report& r) {
  std::ostringstream out;
  Writer w(out);
  const auto& p = r.plan;
  const auto& f = r.figures;
  w.object([&] {
    w.member("model", p.model);
    w.member("parameters", p.parameters());
    w.member("padding", p.padding());
    w.member("strategy", r.strategy);
    w.key("mesh").array([&] {
      for (auto s : p.options.mesh.shape) w.value(s);
    });
    w.member("microbatches", p.options.microbatches);
    write_units(w, p);
    w.member("rank", f.rank);
    w.key("at_rest").object([&] {
      w.member("main_weights", f.rest.main_weights);
      w.member("model_weights", f.rest.model_weights);
      w.member("weights", f.rest.weights);
      w.member("gradients", f.rest.gradients);
      w.member("optimizer_state", f.rest.optimizer_state);
      w.member("total", f.rest.total());
    });
    w.key("transient_peak").object([&] {
      w.member("where", f.peak.where);
      w.member("weights", f.peak.at.weights);
      w.member("packed_gradients", f.peak.at.packed);
      w.member("accumulated_gradients", f.peak.at.accumulators);
      w.member("autograd_gradients", f.peak.at.gradients);
      w.member("total", f.peak.at.total());
      w.member("library_bytes", f.peak.library_bytes);
    });
    w.member("total", f.total());
    w.key("traffic").array([&] {
      for (const auto& t : f.traffic)
        w.object([&] {
          w.member("axis", p.options.mesh.axes[t.axis]);
          w.member("operation", t.operation);
          w.member("dtype", name_of(t.dtype));
          w.member("calls", t.calls);
          w.member("elements", t.elements);
          w.member("bytes", t.bytes);
          w.member("sent", t.sent);
        });
    });
    if (r.fit) write_fit(w, *r.fit);
    w.key("notes").array([&] {
      for (const auto& note : r.notes) w.value(note);
    });
  });
  out << '\n';
  return out.str();
}

}  // namespace fsdp::plan
