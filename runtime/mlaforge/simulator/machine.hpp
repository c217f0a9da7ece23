// A small machine that runs the kernels' text on a CPU: the threads of a block as fibers, shared memory with a record of
// who touched what, barriers, and asynchronous operations that land when a seed says so.
//
// It is no model of a GPU's speed. What it keeps is the part of the memory model that the kernels lean on: an order
// between two accesses exists only where barriers, waits and fences make one. Every thread carries a vector clock of
// what it has seen; asynchronous operations are actors of their own.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <source_location>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace mlaforge::sim {

using Where = std::source_location;

// What the host passes in one launch. Mirrored field by field by simulator.py.
struct Region {
  std::uint64_t address;
  std::uint64_t bytes;
  std::int32_t writable;
  char name[28];
};

struct Settings {
  std::uint64_t seed;
  std::int32_t mode;      // when asynchronous operations land: 0 eager, 1 lazy, 2 random
  std::int32_t overlap;   // the kernel may start before the one before it is complete
  std::int32_t kernel;    // number of the launch, counted by the host
  std::int32_t trace;     // write the events of one block to `trace_file`
  const char* trace_file;
  std::uint32_t trace_block[3];
};

struct Dim3 {
  unsigned x, y, z;
};

constexpr int kWarp = 32;
constexpr int kMaxBarriers = 64;
constexpr std::uint32_t kSharedBase = 1024;  // the hardware keeps the first KiB of the window for itself

// ---- Vector clocks -----------------------------------------------------------------------------------------------

using Clock = std::vector<std::uint32_t>;

inline void join(Clock& into, const Clock& other) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// What an actor has seen, and of that, which plain writes are visible to the async proxy.
struct View {
  Clock seen;
  Clock fenced;
  std::uint64_t version = 0;  // changes whenever the view does
  void join_with(const View& other) {
    join(seen, other.seen);
    join(fenced, other.fenced);
    ++version;
  }
};

enum class Proxy : std::uint8_t { generic, async };

// One access that a later one must be ordered behind.
struct Access {
  std::int32_t actor = -1;
  std::uint32_t clock = 0;
  Proxy proxy = Proxy::generic;
  Where where = Where::current();
};

struct Shadow {
  Access write;
  std::vector<Access> reads;
};

// ---- Threads -----------------------------------------------------------------------------------------------------

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started = false;
  bool finished = false;
  bool overlap_waited = false;
  int thread = 0;
  View view;
  std::function<bool()> ready;  // empty: runnable
  std::string waiting_for;
  Where waiting_at = Where::current();
};

// A collective of the 32 lanes of a warp that is being gathered.
struct Gathering {
  int arrived = 0;
  std::uint64_t generation = 0;
  const char* what = nullptr;
  Where where = Where::current();
  void* slots[kWarp] = {};
};

struct NamedBarrier {
  int arrived = 0;
  int expected = 0;
  std::uint64_t generation = 0;
  View gathering, released;
};

struct Mbarrier {
  int index = 0;
  std::uint32_t address = 0;
  int count = 0;
  int pending = 0;
  std::int64_t bytes = 0;  // still expected (positive) or landed before they were (negative)
  std::uint32_t phase = 0;
  bool fenced = false;
  Access init;
  View gathering, completed;
};

// One warp's share of a WGMMA, from issue to landing; `land` is empty once it has landed.
struct Matmul {
  std::function<void()> land;
};

struct MatmulGroup {
  std::vector<Matmul> operations;
  std::uint32_t last_clock = 0;
};

// Accumulators that operations in flight will write: the true values are here, the threads' own hold NaN meanwhile.
struct Accumulators {
  int in_flight = 0;
  float* registers[kWarp];
  std::vector<float> values;  // lane-major
};

// A warp's tensor core queue: groups complete in order.
struct TensorQueue {
  std::vector<Matmul> open;           // issued, not committed
  std::deque<MatmulGroup> committed;  // not yet waited for
  std::map<float*, Accumulators> accumulators;
  std::shared_ptr<const View> view;   // of the issuing lanes, joined
  std::uint64_t joined[kWarp] = {};
  std::uint32_t clock = 0;
  std::uint32_t done = 0;  // operations up to this one are known to have landed
  bool fenced = false;
};

struct Copy {
  std::function<void()> land;
  int thread;
};

// Something that happened in the traced block. Accesses to shared memory are told in lines of 128 bytes, the unit of the
// swizzle: those of an asynchronous operation when it lands; a warp's plain ones, for each line of the kernel, together
// up to the next event of the warp.
constexpr std::uint32_t kTraceLine = 128;
struct TraceEvent {
  std::uint64_t time;
  std::uint64_t until;  // of plain accesses; else the same as `time`
  int thread;
  const char* what;
  Where where;
  std::string arguments;
  std::set<std::uint32_t> lines;
};
using TraceArguments = std::initializer_list<std::pair<const char*, std::int64_t>>;

// ---- The machine -------------------------------------------------------------------------------------------------

class Machine {
 public:
  Machine(const Settings& settings, Dim3 grid, int threads, std::uint32_t smem_bytes, std::vector<Region> regions)
      : settings_(settings),
        random_(settings.seed * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(settings.kernel)),
        grid_(grid),
        threads_(threads),
        warps_((threads + kWarp - 1) / kWarp),
        actors_(threads + warps_ + kMaxBarriers),
        smem_bytes_(smem_bytes),
        regions_(std::move(regions)) {}

  // Runs every block of the grid; the text of the first fault, empty if there was none.
  std::string run(const std::function<void()>& kernel) {
    kernel_ = &kernel;
    if (!settings_.overlap) writers().clear();
    std::vector<std::uint64_t> order(static_cast<std::size_t>(grid_.x) * grid_.y * grid_.z);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    allocate_stacks();
    for (std::uint64_t linear : order) {
      block_ = {static_cast<unsigned>(linear % grid_.x), static_cast<unsigned>(linear / grid_.x % grid_.y),
                static_cast<unsigned>(linear / grid_.x / grid_.y)};
      run_block();
      if (!fault_.empty()) break;
    }
    if (settings_.trace) write_trace();
    return fault_;
  }

  // -- identity of the running thread
  Fiber& current() { return *current_; }
  int thread() const { return current_->thread; }
  int warp() const { return current_->thread / kWarp; }
  int lane() const { return current_->thread % kWarp; }
  Dim3 block() const { return block_; }
  Dim3 grid() const { return grid_; }
  int threads() const { return threads_; }

  // -- faults
  [[noreturn]] void fail(const Where& where, const char* format, ...) __attribute__((format(printf, 3, 4))) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    report(where, text);
    abandon();
  }

  // -- waiting
  void block_until(std::function<bool()> ready, std::string what, const Where& where) {
    if (ready()) {
      maybe_yield();
      if (ready()) return;
    }
    Fiber& self = *current_;
    self.waiting_for = std::move(what);
    self.waiting_at = where;
    self.ready = std::move(ready);
    yield();
    self.ready = nullptr;
  }

  // A point at which another thread may go first.
  void maybe_yield() {
    if (random_() % 8 == 0) yield();
  }

  // -- collectives of a warp: `last` runs once, when all lanes have arrived, with what each brought.
  void gather(const char* what, const Where& where, void* mine, const std::function<void(void* const*)>& last) {
    Gathering& g = gatherings_[warp()];
    const int lanes = std::min(kWarp, threads_ - warp() * kWarp);
    for (int i = 0; i < lanes; ++i) {
      if (fibers_[warp() * kWarp + i]->finished) {
        fail(where, "%s: lane %d of the warp has exited", what, i);
      }
    }
    if (g.arrived == 0) {
      g.what = what;
      g.where = where;
    } else if (std::strcmp(g.what, what) != 0 || g.where.line() != where.line() || g.where.column() != where.column()) {
      fail(where, "the lanes of a warp do not meet: %s here, %s at %s", what, g.what, place(g.where).c_str());
    }
    g.slots[lane()] = mine;
    if (++g.arrived == lanes) {
      last(g.slots);
      g.arrived = 0;
      ++g.generation;
      return;
    }
    const std::uint64_t generation = g.generation;
    block_until([&g, generation] { return g.generation != generation; }, std::string("the other lanes, in ") + what, where);
  }

  // -- views
  View& view() { return current_->view; }
  void tick() {
    ++current_->view.seen[thread()];
    ++current_->view.version;
  }
  void fence_async() {
    current_->view.fenced = current_->view.seen;
    ++current_->view.version;
  }
  int tensor_actor(int warp) const { return threads_ + warp; }
  int barrier_actor(const Mbarrier& bar) const { return threads_ + warps_ + bar.index; }
  View fresh_view() const { return View{Clock(actors_, 0), Clock(actors_, 0), 0}; }

  // -- shared memory
  unsigned char* shared(std::uint32_t address, std::uint32_t bytes, const Where& where) {
    if (address < kSharedBase || address + bytes > kSharedBase + smem_bytes_) {
      fail(where, "shared access out of bounds: %u bytes at %u of %u", bytes, address - kSharedBase, smem_bytes_);
    }
    return smem_.data() + (address - kSharedBase);
  }

  // Checks and records an access by an actor whose view is `view`.
  void touch(std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view) {
    if (tracing()) trace_access(address - kSharedBase, bytes, write, access);
    const std::uint32_t first = (address - kSharedBase) / 4, last = (address - kSharedBase + bytes - 1) / 4;
    for (std::uint32_t i = first; i <= last; ++i) {
      Shadow& s = shadow_[i];
      if (s.write.actor >= 0 && s.write.actor != access.actor) require_order(s.write, "write", access, write, view, i);
      if (write) {
        for (const Access& read : s.reads) {
          if (read.actor != access.actor) require_order(read, "read", access, write, view, i);
        }
        s.reads.clear();
        s.write = access;
      } else {
        auto mine = std::find_if(s.reads.begin(), s.reads.end(), [&](const Access& r) { return r.actor == access.actor; });
        if (mine != s.reads.end()) {
          *mine = access;
        } else {
          s.reads.push_back(access);
        }
      }
    }
  }

  // A plain access by the running thread.
  unsigned char* plain(std::uint32_t address, std::uint32_t bytes, bool write, const Where& where) {
    unsigned char* p = shared(address, bytes, where);
    if (address % bytes) fail(where, "misaligned shared access: %u bytes at %u", bytes, address - kSharedBase);
    touch(address, bytes, write, {thread(), view().seen[thread()], Proxy::generic, where}, view());
    return p;
  }

  // -- global memory
  void global(const void* pointer, std::uint64_t bytes, bool write, const Where& where) {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    if (address % bytes && bytes <= 16) fail(where, "misaligned global access: %lu bytes at %#lx", bytes, address);
    for (std::size_t r = 0; r < regions_.size(); ++r) {
      const Region& region = regions_[r];
      if (address < region.address || address + bytes > region.address + region.bytes) continue;
      if (write && !region.writable) fail(where, "write to %s, which is an input", region.name);
      track_global(address, bytes, write, region, where);
      return;
    }
    fail(where, "global %s out of bounds: %lu bytes at %#lx, outside of every tensor", write ? "write" : "read", bytes,
         address);
  }

  // -- barriers
  NamedBarrier& named(int id, const Where& where) {
    if (id < 0 || id > 15) fail(where, "named barrier %d: ids are 0 to 15", id);
    return named_[id];
  }

  // Arrives; the generation that will release this arrival.
  std::uint64_t arrive_named(int id, int count, const Where& where) {
    NamedBarrier& bar = named(id, where);
    if (count % kWarp || count <= 0 || count > threads_) {
      fail(where, "named barrier %d: %d threads is no multiple of a warp in the block", id, count);
    }
    if (bar.arrived == 0) {
      bar.expected = count;
      bar.gathering = fresh_view();
    } else if (bar.expected != count) {
      fail(where, "named barrier %d: %d threads expected here, %d by others", id, count, bar.expected);
    }
    bar.gathering.join_with(view());
    tick();
    const std::uint64_t generation = bar.generation;
    if (++bar.arrived == count) {
      bar.arrived = 0;
      bar.released = bar.gathering;
      ++bar.generation;
    }
    return generation;
  }

  void sync_named(int id, int count, const Where& where) {
    const std::uint64_t generation = arrive_named(id, count, where);
    NamedBarrier& bar = named_[id];
    if (lane() == 0) event("barrier", where, {{"id", id}, {"threads", count}});
    block_until([&bar, generation] { return bar.generation != generation; },
                "named barrier " + std::to_string(id) + " for " + std::to_string(count) + " threads", where);
    if (lane() == 0) event("barrier passed", where, {{"id", id}});
    view().join_with(bar.released);
  }

  Mbarrier& mbarrier(std::uint32_t address, const Where& where) {
    auto found = mbarriers_.find(address);
    if (found == mbarriers_.end()) fail(where, "no mbarrier was initialised at %u", address - kSharedBase);
    Mbarrier& bar = found->second;
    if (bar.init.actor != thread() && view().seen[bar.init.actor] < bar.init.clock) {
      fail(where, "the mbarrier at %u is used without an order behind its initialisation at %s", address - kSharedBase,
           place(bar.init.where).c_str());
    }
    return bar;
  }

  void init_mbarrier(std::uint32_t address, int count, const Where& where) {
    shared(address, 8, where);
    if (address % 8) fail(where, "misaligned mbarrier at %u", address - kSharedBase);
    if (mbarriers_.count(address)) fail(where, "the mbarrier at %u is initialised twice", address - kSharedBase);
    if (mbarriers_.size() == kMaxBarriers) fail(where, "more than %d mbarriers", kMaxBarriers);
    Mbarrier bar;
    bar.index = static_cast<int>(mbarriers_.size());
    bar.address = address - kSharedBase;
    bar.count = bar.pending = count;
    bar.init = {thread(), view().seen[thread()], Proxy::generic, where};
    bar.gathering = bar.completed = fresh_view();
    mbarriers_.emplace(address, std::move(bar));
  }

  void fence_mbarriers() {
    for (auto& [address, bar] : mbarriers_) {
      if (bar.init.actor == thread()) bar.fenced = true;
    }
  }

  void arrive_mbarrier(std::uint32_t address, std::int64_t expect, const Where& where) {
    Mbarrier& bar = mbarrier(address, where);
    if (bar.pending == 0) {
      fail(where, "the mbarrier at %u gets more than its %d arrivals in phase %u", address - kSharedBase, bar.count, bar.phase);
    }
    bar.bytes += expect;
    --bar.pending;
    bar.gathering.join_with(view());
    tick();
    event(expect ? "expect" : "arrive", where, {{"mbarrier", bar.address}, {"phase", bar.phase}, {"bytes", expect}});
    settle(bar, where);
    maybe_yield();
  }

  void wait_mbarrier(std::uint32_t address, int parity, const Where& where) {
    Mbarrier& bar = mbarrier(address, where);
    if (lane() == 0) event("wait", where, {{"mbarrier", bar.address}, {"parity", parity}});
    block_until([&bar, parity] { return static_cast<int>(bar.phase & 1) != (parity & 1); },
                "the mbarrier at " + std::to_string(address - kSharedBase) + ", parity " + std::to_string(parity), where);
    if (lane() == 0) event("waited", where, {{"mbarrier", bar.address}});
    view().join_with(bar.completed);
  }

  // -- asynchronous copies into shared memory, counted on a barrier
  void copy_async(std::uint32_t bar_address, std::int64_t bytes, const Where& where,
                  const std::function<void(Access, const View&)>& write) {
    Mbarrier& bar = mbarrier(bar_address, where);
    if (!bar.fenced) fail(where, "the mbarrier at %u is not visible to TMA: fence its initialisation", bar_address - kSharedBase);
    const std::int64_t number = ++copies_issued_;
    event("copy", where, {{"copy", number}, {"mbarrier", bar.address}, {"phase", bar.phase}, {"bytes", bytes}});
    // Everything that lands in a phase becomes known together, when the phase ends: the phase is the actor's clock.
    const Access access{barrier_actor(bar), bar.phase + 1, Proxy::async, where};
    const View issued = view();
    copies_.push_back({[this, &bar, bytes, number, access, issued, write] {
                         landing_ = event("landed", access.where, {{"copy", number}});
                         write(access, issued);
                         landing_ = nullptr;
                         bar.bytes -= bytes;
                         settle(bar, access.where);
                       },
                       thread()});
    if (settings_.mode == 0) land_copy(copies_.size() - 1);
    maybe_yield();
  }

  // -- WGMMA: one warp's share at a time
  TensorQueue& queue() { return queues_[warp()]; }

  // Issues one operation of the warp; `first` is the warp's first thread. Its accesses are those of an actor of its own,
  // which knows what the 32 lanes knew.
  void issue_matmul(const Where& where, std::function<void(Access, const View&)> compute) {
    TensorQueue& q = queue();
    if (!q.fenced) fail(where, "wgmma without a wgmma fence since the registers were last in use");
    bool changed = q.view == nullptr;
    for (int i = 0; i < kWarp; ++i) changed |= q.joined[i] != fibers_[warp() * kWarp + i]->view.version;
    if (changed) {
      auto joined = std::make_shared<View>(q.view ? *q.view : fresh_view());
      for (int i = 0; i < kWarp; ++i) {
        const View& lane = fibers_[warp() * kWarp + i]->view;
        joined->join_with(lane);
        q.joined[i] = lane.version;
      }
      q.view = std::move(joined);
    }
    const Access access{tensor_actor(warp()), ++q.clock, Proxy::async, where};
    event("wgmma", where, {{"operation", q.clock}});
    q.open.push_back({[this, access, view = q.view, compute = std::move(compute)] {
      landing_ = event("wgmma landed", access.where, {{"operation", access.clock}});
      compute(access, *view);
      landing_ = nullptr;
    }});
    if (settings_.mode == 0) land(q.open.back());
  }

  void commit_matmuls(const Where& where) {
    TensorQueue& q = queue();
    event("commit", where, {{"operation", q.clock}});
    q.committed.push_back({std::move(q.open), q.clock});
    q.open.clear();
  }

  // Lands every group of the warp but the newest `pending`.
  void wait_matmuls(int pending, const Where& where) {
    TensorQueue& q = queue();
    if (!q.open.empty()) fail(where, "wgmma wait with %zu operations that no commit has closed", q.open.size());
    while (q.committed.size() > static_cast<std::size_t>(pending)) {
      for (Matmul& m : q.committed.front().operations) land(m);
      q.done = q.committed.front().last_clock;
      q.committed.pop_front();
    }
    q.fenced = false;
    event("wgmma waited", where, {{"operation", q.done}});
  }

  // What a lane knows after the wait.
  void see_matmuls() {
    view().seen[tensor_actor(warp())] = queue().done;
    ++view().version;
  }

  std::mt19937_64& random() { return random_; }
  static std::string place(const Where& where) {
    const char* file = std::strrchr(where.file_name(), '/');
    return std::string(file ? file + 1 : where.file_name()) + ":" + std::to_string(where.line());
  }

  // Records an event of the running thread, if its block is traced. An event is a step of its own, so that their order
  // shows.
  TraceEvent* event(const char* what, const Where& where, TraceArguments arguments = {}) {
    if (!tracing()) return nullptr;
    for (auto open = open_accesses_.begin(); open != open_accesses_.end();) {
      open = std::get<0>(open->first) == warp() ? open_accesses_.erase(open) : std::next(open);
    }
    std::string text;
    for (const auto& [name, value] : arguments) text += (text.empty() ? "" : " ") + (name + ("=" + std::to_string(value)));
    ++steps_;
    const std::uint64_t time = steps_ - first_step_;
    trace_.push_back({time, time, thread(), what, where, std::move(text), {}});
    return &trace_.back();
  }

 private:
  static constexpr std::size_t kStack = 128 << 10;

  void allocate_stacks() {
    stacks_ = static_cast<unsigned char*>(mmap(nullptr, kStack * threads_, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks_ == MAP_FAILED) fault_ = "no memory for the stacks of the threads";
  }

  bool tracing() const {
    const std::uint32_t* b = settings_.trace_block;
    return settings_.trace && current_ && block_.x == b[0] && block_.y == b[1] && block_.z == b[2];
  }

  void trace_access(std::uint32_t offset, std::uint32_t bytes, bool write, const Access& access) {
    TraceEvent* into = landing_;
    if (access.proxy == Proxy::generic) {
      TraceEvent*& open = open_accesses_[{access.actor / kWarp, write, access.where.line(), access.where.file_name()}];
      if (!open) {
        ++steps_;
        trace_.push_back({steps_ - first_step_, 0, access.actor, write ? "write" : "read", access.where, "", {}});
        open = &trace_.back();
      }
      open->until = steps_ - first_step_;
      into = open;
    }
    if (!into) return;
    for (std::uint32_t line = offset / kTraceLine; line <= (offset + bytes - 1) / kTraceLine; ++line) into->lines.insert(line);
  }

  void run_block() {
    first_step_ = steps_;
    open_accesses_.clear();
    smem_.assign(smem_bytes_, 0xff);  // NaN in every 16- and 32-bit format
    shadow_.assign(smem_bytes_ / 4 + 1, Shadow{});
    mbarriers_.clear();
    copies_.clear();
    named_.assign(16, NamedBarrier{});
    gatherings_.assign(warps_, Gathering{});
    queues_.assign(warps_, TensorQueue{});
    fibers_.clear();
    for (int t = 0; t < threads_; ++t) {
      auto fiber = std::make_unique<Fiber>();
      fiber->thread = t;
      fiber->view = fresh_view();
      fiber->view.seen[t] = 1;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = stacks_ + kStack * t;
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Machine::enter), 0);
      fibers_.push_back(std::move(fiber));
    }
    schedule();
    if (!fault_.empty()) return;
    for (const TensorQueue& q : queues_) {
      if (!q.open.empty() || !q.committed.empty()) {
        current_ = fibers_.front().get();
        report(Where::current(), "a warp ends with wgmma that nobody waited for");
        return;
      }
    }
    for (const auto& [address, bar] : mbarriers_) {
      if (bar.bytes != 0) {
        current_ = fibers_.front().get();
        report(bar.init.where, ("the mbarrier at " + std::to_string(address - kSharedBase) + " ends with " +
                                std::to_string(bar.bytes) + " bytes that were expected and not copied").c_str());
        return;
      }
    }
  }

  void schedule() {
    std::vector<Fiber*> runnable;
    while (fault_.empty()) {
      runnable.clear();
      bool alive = false;
      for (auto& fiber : fibers_) {
        if (fiber->finished) continue;
        alive = true;
        if (!fiber->ready || fiber->ready()) runnable.push_back(fiber.get());
      }
      if (!alive) {
        while (!copies_.empty() && fault_.empty()) land_copy(random_() % copies_.size());
        return;
      }
      if (settings_.mode == 2) land_some_matmuls();
      if (!copies_.empty() && (runnable.empty() || (settings_.mode == 2 && random_() % 4 == 0))) {
        land_copy(random_() % copies_.size());
        if (runnable.empty()) continue;
      }
      if (runnable.empty()) {
        deadlock();
        return;
      }
      // One warp at a time, in an order of the seed: its lanes run until each has to wait.
      const int chosen = runnable[random_() % runnable.size()]->thread / kWarp;
      for (Fiber* fiber : runnable) {
        if (fiber->thread / kWarp != chosen || !fault_.empty()) continue;
        ++steps_;
        resume(*fiber);
      }
    }
  }

  void land_copy(std::size_t i) {
    Copy copy = std::move(copies_[i]);
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
    Fiber* const before = current_;
    current_ = fibers_[copy.thread].get();
    copy.land();
    current_ = before;
  }

  static void land(Matmul& m) {
    if (!m.land) return;
    const std::function<void()> operation = std::move(m.land);
    m.land = nullptr;
    operation();
  }

  void land_some_matmuls() {
    const int w = static_cast<int>(random_() % warps_);
    for (MatmulGroup& group : queues_[w].committed) {
      for (Matmul& m : group.operations) {
        if (!m.land) continue;
        if (random_() % 3 == 0) return;
        Fiber* const before = current_;
        current_ = fibers_[w * kWarp].get();
        land(m);
        current_ = before;
        if (!fault_.empty()) return;
      }
    }
  }

  void settle(Mbarrier& bar, const Where& where) {
    if (bar.pending != 0 || bar.bytes != 0) return;
    event("phase", where, {{"mbarrier", bar.address}, {"phase", bar.phase}});
    bar.pending = bar.count;
    ++bar.phase;
    bar.gathering.seen[barrier_actor(bar)] = bar.phase;
    bar.completed.join_with(bar.gathering);
  }

  void resume(Fiber& fiber) {
    current_ = &fiber;
    if (_setjmp(scheduler_) == 0) {
      if (!fiber.started) {
        fiber.started = true;
        setcontext(&fiber.context);
      }
      _longjmp(fiber.jump, 1);
    }
    current_ = nullptr;
  }

  void yield() {
    if (_setjmp(current_->jump) == 0) _longjmp(scheduler_, 1);
  }

  [[noreturn]] void abandon() { _longjmp(scheduler_, 1); }

  static void enter();

  void require_order(const Access& before, const char* kind, const Access& now, bool write, const View& view,
                     std::uint32_t word) {
    const bool ordered = view.seen[before.actor] >= before.clock;
    const bool crosses = before.proxy == Proxy::generic && now.proxy == Proxy::async && std::strcmp(kind, "write") == 0;
    if (ordered && (!crosses || view.fenced[before.actor] >= before.clock)) return;
    char text[512];
    std::snprintf(text, sizeof text, "shared memory race at byte %u: this %s%s by %s, and the %s%s by %s at %s, %s", word * 4,
                  now.proxy == Proxy::async ? "asynchronous " : "", write ? "write" : "read", actor_name(now.actor).c_str(),
                  before.proxy == Proxy::async ? "asynchronous " : "", kind, actor_name(before.actor).c_str(),
                  place(before.where).c_str(),
                  ordered ? "have no fence.proxy.async between them" : "are not ordered by any barrier or wait");
    report(now.where, text);
    abandon_operation();
  }

  // A fault may be found while the scheduler itself lands an operation: it goes on, and stops at its next step.
  void abandon_operation() {
    if (in_fiber()) abandon();
  }
  bool in_fiber() const {
    const auto* here = reinterpret_cast<const unsigned char*>(__builtin_frame_address(0));
    return here >= stacks_ && here < stacks_ + kStack * threads_;
  }

  std::string actor_name(int actor) const {
    if (actor < threads_) return "thread " + std::to_string(actor) + " (warp " + std::to_string(actor / kWarp) + ")";
    if (actor < threads_ + warps_) return "wgmma of warp " + std::to_string(actor - threads_);
    return "TMA on mbarrier " + std::to_string(actor - threads_ - warps_);
  }

  void report(const Where& where, const char* text) {
    if (!fault_.empty()) return;
    fault_ = place(where) + ": block (" + std::to_string(block_.x) + ", " + std::to_string(block_.y) + ", " +
             std::to_string(block_.z) + ")";
    if (current_) fault_ += ", warp " + std::to_string(warp()) + ", thread " + std::to_string(thread());
    fault_ += ": ";
    fault_ += text;
  }

  void deadlock() {
    std::map<std::string, std::vector<int>> waiting;
    for (const auto& fiber : fibers_) {
      if (fiber->finished) continue;
      const int warp = fiber->thread / kWarp;
      auto& warps = waiting[place(fiber->waiting_at) + " waits for " + fiber->waiting_for];
      if (warps.empty() || warps.back() != warp) warps.push_back(warp);
    }
    std::string text = "deadlock:";
    for (const auto& [what, warps] : waiting) {
      text += "\n  warp";
      for (int warp : warps) text += " " + std::to_string(warp);
      text += " at " + what;
    }
    for (const auto& [address, bar] : mbarriers_) {
      text += "\n  mbarrier at " + std::to_string(address - kSharedBase) + ": phase " + std::to_string(bar.phase) + ", " +
              std::to_string(bar.pending) + " of " + std::to_string(bar.count) + " arrivals and " +
              std::to_string(bar.bytes) + " bytes missing";
    }
    for (std::size_t id = 0; id < named_.size(); ++id) {
      if (named_[id].arrived) {
        text += "\n  named barrier " + std::to_string(id) + ": " + std::to_string(named_[id].arrived) + " of " +
                std::to_string(named_[id].expected) + " threads";
      }
    }
    for (const auto& fiber : fibers_) {
      if (!fiber->finished) {
        current_ = fiber.get();
        report(fiber->waiting_at, text.c_str());
        current_ = nullptr;
        return;
      }
    }
  }

  // Words of global memory and who wrote them last: another block of the same kernel must not touch them, nor a kernel
  // that runs ahead of its predecessor's end. Kept across launches by the host process.
  struct Writer {
    std::int32_t kernel;
    std::uint64_t block;
    Where where;
  };
  static std::unordered_map<std::uint64_t, Writer>& writers() {
    static std::unordered_map<std::uint64_t, Writer> words;
    return words;
  }

  void track_global(std::uint64_t address, std::uint64_t bytes, bool write, const Region& region, const Where& where) {
    if (!region.writable) return;
    const std::uint64_t mine = block_.x + static_cast<std::uint64_t>(grid_.x) * (block_.y + static_cast<std::uint64_t>(grid_.y) * block_.z);
    for (std::uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
      auto found = writers().find(word);
      if (found != writers().end()) {
        const Writer& w = found->second;
        if (w.kernel == settings_.kernel && w.block != mine) {
          fail(where, "%s is %s here and was written by another block of this kernel at %s", region.name,
               write ? "written" : "read", place(w.where).c_str());
        }
        if (settings_.overlap && w.kernel == settings_.kernel - 1 && !current_->overlap_waited) {
          fail(where, "%s was written by the kernel before, at %s, and this thread has not waited for its end", region.name,
               place(w.where).c_str());
        }
      }
      if (write) writers()[word] = {settings_.kernel, mine, where};
    }
  }

  void write_trace() const {
    std::FILE* file = std::fopen(settings_.trace_file, "w");
    if (!file) return;
    for (const TraceEvent& e : trace_) {
      std::fprintf(file, "%lu\t%lu\t%d\t%s\t%s\t%s\t", static_cast<unsigned long>(e.time),
                   static_cast<unsigned long>(e.until), e.thread, e.what, place(e.where).c_str(), e.arguments.c_str());
      // Successive lines as a range of bytes.
      for (auto line = e.lines.begin(); line != e.lines.end();) {
        const std::uint32_t first = *line;
        std::uint32_t last = first;
        while (++line != e.lines.end() && *line == last + 1) ++last;
        std::fprintf(file, "%s%u-%u", first == *e.lines.begin() ? "" : ",", first * kTraceLine, (last + 1) * kTraceLine);
      }
      std::fputc('\n', file);
    }
    std::fclose(file);
  }

  Settings settings_;
  std::mt19937_64 random_;
  Dim3 grid_;
  int threads_;
  int warps_;
  int actors_;
  std::uint32_t smem_bytes_;
  std::vector<Region> regions_;
  const std::function<void()>* kernel_ = nullptr;

  Dim3 block_{0, 0, 0};
  std::vector<std::unique_ptr<Fiber>> fibers_;
  unsigned char* stacks_ = nullptr;
  Fiber* current_ = nullptr;
  jmp_buf scheduler_;
  std::uint64_t steps_ = 0;
  std::string fault_;

  std::vector<unsigned char> smem_;
  std::vector<Shadow> shadow_;
  std::vector<NamedBarrier> named_;
  std::map<std::uint32_t, Mbarrier> mbarriers_;
  std::vector<Gathering> gatherings_;
  std::vector<TensorQueue> queues_;
  std::vector<Copy> copies_;

  std::deque<TraceEvent> trace_;  // whose elements stay where they are
  std::map<std::tuple<int, bool, std::uint32_t, const char*>, TraceEvent*> open_accesses_;  // by warp
  TraceEvent* landing_ = nullptr;  // of the asynchronous operation that is landing
  std::uint64_t first_step_ = 0;   // of the block
  std::int64_t copies_issued_ = 0;
};

inline Machine* machine = nullptr;

inline void Machine::enter() {
  (*machine->kernel_)();
  if (machine->lane() == 0) machine->event("exit", Where::current());
  machine->current_->finished = true;
  machine->abandon();
}

}  // namespace mlaforge::sim
