// A small machine that runs the kernels' text on a CPU: the threads of a cluster's blocks as fibers, shared memory with a
// record of who touched what, barriers, and asynchronous operations that land when a seed says so.
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
#include <optional>
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
  const std::uint8_t* unwritten;  // for each 16 bytes of an input, whether they hold nothing; null: all is defined
  std::int32_t writable;
  std::int32_t defined;  // a writable one holds values before the first kernel of a call writes it
  char name[28];
};

struct Settings {
  std::uint64_t seed;
  std::int32_t mode;      // when asynchronous operations land: 0 eager, 1 lazy, 2 random
  std::int32_t overlap;   // the kernel may start before the one before it is complete
  std::int32_t cooperative;  // all blocks of the grid run together
  std::int32_t kernel;    // number of the launch, counted by the host
  void** writers;         // who wrote global memory: kept by the host from launch to launch
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

// Actors that appear late (bulk stores) lie behind the end of older clocks, which count as zero there.
inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (std::size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}
inline bool has_seen(const Clock& clock, std::int32_t actor, std::uint32_t time) {
  return static_cast<std::size_t>(actor) < clock.size() && clock[actor] >= time;
}
inline void see(Clock& clock, std::int32_t actor, std::uint32_t time) {
  if (static_cast<std::size_t>(actor) >= clock.size()) clock.resize(actor + 1, 0);
  clock[actor] = std::max(clock[actor], time);
}

// Clocks of clusters, by the number of the cluster.
using Clocks = std::map<std::uint64_t, Clock>;

inline void join(Clocks& into, const Clocks& other) {
  for (const auto& [cluster, clock] : other) join(into[cluster], clock);
}

// What an actor has seen of its own cluster, and of that, which plain writes are visible to the async proxy; and what
// atomics told it of other clusters.
struct View {
  Clock seen;
  Clock fenced;
  std::uint64_t version = 0;  // changes whenever the view does
  std::shared_ptr<const Clocks> others;
  void join_with(const View& other) {
    join(seen, other.seen);
    join(fenced, other.fenced);
    join_others(other.others);
    ++version;
  }
  void join_others(const std::shared_ptr<const Clocks>& more) {
    if (!more || more == others) return;
    if (!others) {
      others = more;
      return;
    }
    auto joined = std::make_shared<Clocks>(*others);
    join(*joined, *more);
    others = std::move(joined);
  }
};

// What a release hands over: the views of those who released, by cluster.
struct Released {
  Clocks seen;
  Clocks fenced;
  void join_with(const Released& other) {
    join(seen, other.seen);
    join(fenced, other.fenced);
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

// ---- Undefined values --------------------------------------------------------------------------------------------

// Memory that nobody has written may be copied and multiplied with, as long as nothing of it reaches a result: a tile's
// rows behind the last token are, until a mask or zeros take their place. So what is undefined travels as NaN whose
// payload, the mark, says where it came from. A mark is one 16-bit element, NaN as bf16 and as fp16, and fills both halves
// of a float32. No arithmetic makes one from other numbers. A NaN of the user's or a piece of an integer may look like one,
// though: so a word of memory can hold marks only if a flag says so, and half a register only marks that were brought
// there. Accumulators in flight hold marks, too, signalling ones: those stay what they are until a thread computes with them.
using Mark = std::uint16_t;
constexpr Mark kNoMark = 0;
constexpr Mark kUnwritten = 0x7fc1;  // what shared memory holds at first
constexpr Mark kFirstMark = 0x7fc2;
constexpr Mark kLastMark = 0x7ffe;

constexpr std::uint32_t kQuiet = 0x00400000;  // the bit that tells quiet NaN from signalling ones

inline float as_float(Mark mark) {
  const std::uint32_t bits = mark * 0x10001u;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// What made a mark.
struct Origin {
  std::int32_t actor;
  Where where;
  Mark from;  // of what was read
  bool copy;  // it is in shared memory as it was in global memory: nobody has read it as a number
  std::string text;
  bool in_elements = false;  // some register holds it as a 16-bit element
};

// ---- Threads -----------------------------------------------------------------------------------------------------

// A bulk store: reads shared memory, then writes global memory, each once and some time after the other.
struct Store {
  std::function<void()> read;
  std::function<void()> write;
};

// A thread's bulk stores. Its groups are numbered from 1; their reads and their writes are an actor each, whose clock is
// the number of the group.
struct StoreQueue {
  std::int32_t actor = -1;
  std::vector<std::shared_ptr<Store>> open;
  std::deque<std::vector<std::shared_ptr<Store>>> committed;  // not yet waited for
  std::uint32_t groups = 0;
  std::uint32_t read = 0;  // groups up to this one are known to have read shared memory
  Where where = Where::current();  // of the last store
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started = false;
  bool finished = false;
  bool overlap_waited = false;
  bool cluster_arrived = false;
  std::uint64_t cluster_generation = 0;
  int block = 0;   // rank in the cluster
  int thread = 0;  // in the block
  View view;
  StoreQueue stores;
  std::optional<View> initialised;  // what its fence of initialised mbarriers hands over by any arrival
  Released fenced;    // what its last fence hands over to its relaxed atomics
  Released gathered;  // what its relaxed atomics found, for the next fence to take over
  const void* polled = nullptr;  // the word that it reads again and again, what it finds there, and how often
  std::int32_t polled_value = 0;
  int polls = 0;
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
  bool any = false, any_released = false;  // of the predicates that a reducing barrier gathers
  std::uint64_t generation = 0;
  View gathering, released;
};

struct Mbarrier {
  std::int32_t actor = 0;
  std::uint32_t address = 0;
  int count = 0;
  int pending = 0;
  std::int64_t bytes = 0;  // still expected (positive) or landed before they were (negative)
  std::uint32_t phase = 0;
  bool fenced = false;
  Access init;
  View gathering, completed;
};

// One warp's share of a WGMMA, from issue to wait; `land` is empty once it has landed. The threads' registers are theirs
// again only then.
struct Matmul {
  std::function<void()> land;
  std::function<void()> finish;
};

struct MatmulGroup {
  std::vector<Matmul> operations;
  std::uint32_t last_clock = 0;
};

// Accumulators that operations in flight write: the true values are here, the threads' own hold a mark meanwhile.
struct Accumulators {
  int in_flight = 0;
  std::uint32_t meanwhile;
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

// A WGMMA as the first warp of its warpgroup issued it, for the others to be compared with.
struct Together {
  Where where;
  std::uint64_t a, b;
  int n;
  bool accumulate;
};
struct Warpgroup {
  std::deque<Together> issued;  // by some of the warps
  std::uint32_t before = 0;     // how many all of them have issued
};

struct Copy {
  std::function<void()> land;
  Fiber* fiber;
};

// One of the blocks that run together.
struct Block {
  Dim3 index{0, 0, 0};
  int rank = 0;  // among them; those of a cluster lie behind each other
  std::vector<unsigned char> smem;
  std::vector<Shadow> shadow;        // of each word of it
  std::vector<std::uint8_t> marked;  // whether the word may hold marks
  std::vector<NamedBarrier> named;
  std::map<std::uint32_t, Mbarrier> mbarriers;
  std::vector<Gathering> gatherings;
  std::vector<TensorQueue> queues;
  std::vector<Warpgroup> warpgroups;
};

// How global memory is accessed: by an asynchronous operation, by an atomic one, by one that may copy what is undefined.
struct Manner {
  const Access* async = nullptr;
  bool atomic = false;
  bool copies = false;
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
  // The blocks of a cluster run together, clusters one after another; of a cooperative launch all run together.
  Machine(const Settings& settings, Dim3 grid, Dim3 cluster, int threads, std::uint32_t smem_bytes,
          std::vector<Region> regions)
      : settings_(settings),
        random_(settings.seed * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(settings.kernel)),
        grid_(grid),
        cluster_(cluster),
        cluster_size_(static_cast<int>(cluster.x * cluster.y * cluster.z)),
        size_(settings.cooperative ? static_cast<int>(grid.x * grid.y * grid.z) : cluster_size_),
        threads_(threads),
        warps_((threads + kWarp - 1) / kWarp),
        actors_(size_ * (threads + warps_ + kMaxBarriers)),
        smem_bytes_(smem_bytes),
        regions_(std::move(regions)),
        writers_(kept_writers(settings)) {}

  ~Machine() {
    if (stacks_) munmap(stacks_, stack_bytes());
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Runs every block of the grid; the text of the first fault, empty if there was none.
  std::string run(const std::function<void()>& kernel) {
    kernel_ = &kernel;
    if (!settings_.overlap) writers_.clear();
    std::vector<std::uint64_t> order(static_cast<std::size_t>(grid_.x) * grid_.y * grid_.z / size_);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    allocate_stacks();
    for (std::uint64_t linear : order) {
      if (!fault_.empty()) break;
      number_ = linear;
      run_blocks();
    }
    if (settings_.trace) write_trace();
    return fault_;
  }

  // -- identity of the running thread
  Fiber& current() { return *current_; }
  int thread() const { return current_->thread; }
  int warp() const { return current_->thread / kWarp; }
  int lane() const { return current_->thread % kWarp; }
  // The running thread's block.
  Block& home() { return blocks_[current_->block]; }
  const Block& home() const { return blocks_[current_->block]; }
  Block& peer(int rank, const Where& where) {
    if (rank < 0 || rank >= cluster_size_) fail(where, "rank %d in a cluster of %d blocks", rank, cluster_size_);
    return blocks_[current_->block - cluster_rank() + rank];
  }
  int cluster_rank() const { return current_->block % cluster_size_; }
  Dim3 block() const { return home().index; }
  int cluster_size() const { return cluster_size_; }
  std::int32_t actor() const { return current_->block * threads_ + current_->thread; }
  // The threads of the running thread's warp.
  Fiber& lane_of_warp(int lane) { return *fibers_[current_->block * threads_ + warp() * kWarp + lane]; }
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
    Gathering& g = home().gatherings[warp()];
    const int lanes = std::min(kWarp, threads_ - warp() * kWarp);
    for (int i = 0; i < lanes; ++i) {
      if (lane_of_warp(i).finished) {
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
    ++current_->view.seen[actor()];
    ++current_->view.version;
  }
  void fence_async() {
    current_->view.fenced = current_->view.seen;
    ++current_->view.version;
  }
  // Actors: the threads of every block, then the warps' tensor cores, then the mbarriers.
  std::int32_t tensor_actor() const { return size_ * threads_ + current_->block * warps_ + warp(); }
  View fresh_view() const { return View{Clock(actors_, 0), Clock(actors_, 0), 0, nullptr}; }

  // -- shared memory
  unsigned char* shared(std::uint32_t address, std::uint32_t bytes, const Where& where) {
    return shared(home(), address, bytes, where);
  }
  unsigned char* shared(Block& block, std::uint32_t address, std::uint32_t bytes, const Where& where) {
    if (address < kSharedBase || address + bytes > kSharedBase + smem_bytes_) {
      fail(where, "shared access out of bounds: %u bytes at %u of %u", bytes, address - kSharedBase, smem_bytes_);
    }
    return block.smem.data() + (address - kSharedBase);
  }

  // Checks and records an access by an actor whose view is `view`.
  void touch(std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view) {
    touch(home(), address, bytes, write, access, view);
  }
  void touch(Block& block, std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view) {
    if (tracing() && &block == &home()) trace_access(address - kSharedBase, bytes, write, access);
    const std::uint32_t first = (address - kSharedBase) / 4, last = (address - kSharedBase + bytes - 1) / 4;
    if (write) std::memset(block.marked.data() + first, 0, last - first + 1);
    for (std::uint32_t i = first; i <= last; ++i) {
      Shadow& s = block.shadow[i];
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
    touch(address, bytes, write, {actor(), view().seen[actor()], Proxy::generic, where}, view());
    return p;
  }

  // -- undefined values

  // Whether some of these bytes of shared memory may be marks.
  bool may_be_marked(const Block& block, std::uint32_t address, std::uint32_t bytes) const {
    const std::uint32_t first = (address - kSharedBase) / 4, last = (address - kSharedBase + bytes - 1) / 4;
    if (last == first + 3) {  // of 16 bytes, by far the most frequent
      std::uint32_t flags;
      std::memcpy(&flags, block.marked.data() + first, 4);
      return flags != 0;
    }
    return std::any_of(block.marked.begin() + first, block.marked.begin() + last + 1, [](std::uint8_t flag) { return flag; });
  }

  // Flags a word of shared memory into which the running thread's warp wrote marks.
  void flag_marked(std::uint32_t address) { home().marked[(address - kSharedBase) / 4] = 1; }

  // The mark that a register holds, as a float32 or as an element; kNoMark if what it holds is defined.
  Mark mark_of(float x) const {
    if (x == x) return kNoMark;
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits |= kQuiet;
    const auto element = static_cast<std::uint16_t>(bits);
    return (bits >> 16 & 0x7fff) == element && has_origin(element) ? element : kNoMark;
  }
  Mark mark_of(std::uint16_t element) const {
    return has_origin(element) && origin(element).in_elements ? element : kNoMark;
  }

  // The element that a mark becomes in a register.
  std::uint16_t as_element(Mark mark) {
    origins_[mark - kFirstMark].in_elements = true;
    return mark;
  }

  // The mark of an element in a flagged word of shared memory, read by an access that takes it to registers.
  Mark take_mark(std::uint16_t element, std::uint32_t address, const Access& access) {
    if (!is_mark(element)) return kNoMark;
    if (!is_raw(element)) return element;
    return make_mark({access.actor, access.where, element, false, ""}, [&] {
      const bool unwritten = element == kUnwritten;
      return (unwritten ? "" : origin(element).text + "; ") + who() + " reads byte " + std::to_string(address - kSharedBase) +
             " of shared memory" + (unwritten ? ", which is uninitialised so far, at " : " at ") + place(access.where);
    });
  }

  // The mark of the accumulators of a wgmma of the running warp.
  Mark mark_in_flight(const Where& where) {
    return make_mark({-1, where, kNoMark, false, ""},
                     [&] { return "an accumulator that the wgmma at " + place(where) + " is writing"; });
  }

  // Puts marks in place of what a copy brought from global memory that nobody has written.
  void copy_mark(Block& to, std::uint32_t address, std::uint32_t bytes, const Access& access, const void* from) {
    const Mark mark = make_mark({access.actor, access.where, kNoMark, true, ""}, [&] {
      return who() + " copies uninitialised bytes of " + region_of(from).name + " at " + place(access.where);
    });
    for (std::uint32_t i = address & ~1u; i < address + bytes; i += 2) {
      std::memcpy(shared(to, i, 2, access.where), &mark, 2);
      to.marked[(i - kSharedBase) / 4] = 1;
    }
  }

  // Refuses to read, as a number, what nobody has written; what was computed of such may be read as a float32.
  void require_defined_load(std::uint32_t address, const unsigned char* p, bool is_float, const Where& where) {
    for (int half = 0; half < 2; ++half) {
      std::uint16_t element;
      std::memcpy(&element, p + 2 * half, 2);
      if (!is_mark(element)) continue;
      if (is_raw(element) || !is_float) fail(where, "this load reads %s", describe(element, address).c_str());
    }
  }

  // Refuses to store to global memory what comes from memory that nobody has written: from registers, and from shared
  // memory.
  void require_defined(Mark mark, const void* to, const Where& where) {
    if (mark != kNoMark) fail(where, "this store to %s writes %s", region_of(to).name, describe(mark, kSharedBase).c_str());
  }
  void require_defined_copy(std::uint32_t address, std::uint32_t bytes, const void* to, const Where& where) {
    if (!may_be_marked(home(), address, bytes)) return;
    for (std::uint32_t i = address & ~1u; i < address + bytes; i += 2) {
      std::uint16_t element;
      std::memcpy(&element, shared(i, 2, where), 2);
      if (is_mark(element)) fail(where, "this store to %s writes %s", region_of(to).name, describe(element, i).c_str());
    }
  }

  // -- global memory

  // Whether nobody has written some of what is read; only an access that copies may read it.
  bool global(const void* pointer, std::uint64_t bytes, bool write, const Where& where, Manner manner = {}) {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    if (address % bytes && bytes <= 16) fail(where, "misaligned global access: %lu bytes at %#lx", bytes, address);
    for (std::size_t r = 0; r < regions_.size(); ++r) {
      const Region& region = regions_[r];
      if (address < region.address || address + bytes > region.address + region.bytes) continue;
      if (write && !region.writable) fail(where, "write to %s, which is an input", region.name);
      bool undefined = track_global(address, bytes, write, region, where, manner);
      const std::uint64_t offset = address - region.address;
      if (region.unwritten) {
        for (std::uint64_t i = offset / 16; i <= (offset + bytes - 1) / 16; ++i) undefined = undefined || region.unwritten[i];
      }
      if (undefined && !manner.copies) {
        fail(where, "this load reads byte %lu of %s, which is uninitialised so far", offset, region.name);
      }
      return undefined;
    }
    fail(where, "global %s out of bounds: %lu bytes at %#lx, outside of every tensor", write ? "write" : "read", bytes,
         address);
  }

  // -- atomics: between clusters, and between threads, nothing else makes an order in global memory

  // What is known of a word that atomics change, taken over and handed over by an atomic of the running thread. It is
  // `acquire` and `release`, or relaxed, for fences to complete.
  void atomic(const void* pointer, bool acquire, bool release) {
    Released& word = atomics_[reinterpret_cast<std::uint64_t>(pointer)];
    const Released found = word;
    if (release) {
      word.join_with(released());
      tick();
    } else {
      word.join_with(current_->fenced);
    }
    if (acquire) {
      take_over(found);
    } else {
      current_->gathered.join_with(found);
    }
  }

  void fence_gpu() {
    take_over(current_->gathered);
    current_->fenced = released();
    tick();
  }

  // The running thread reads `value` at an atomic word without changing it. After many times it waits for a change, so
  // that a loop around it ends in a deadlock that can be reported.
  void poll(const std::int32_t* word, std::int32_t value, const Where& where) {
    Fiber& self = *current_;
    if (self.polled != word || self.polled_value != value) {
      self.polled = word;
      self.polled_value = value;
      self.polls = 0;
    }
    if (++self.polls < kPatience) {
      maybe_yield();
      return;
    }
    self.polls = 0;
    block_until([word, value] { return *word != value; },
                "a change of a word in global memory that holds " + std::to_string(value) +
                    (settings_.cooperative ? "" : " (blocks outside of a cluster run one after another)"),
                where);
  }

  // -- barriers
  NamedBarrier& named(int id, const Where& where) {
    if (id < 0 || id > 15) fail(where, "named barrier %d: ids are 0 to 15", id);
    return home().named[id];
  }

  // Arrives; the generation that will release this arrival.
  std::uint64_t arrive_named(int id, int count, const Where& where, bool any = false) {
    NamedBarrier& bar = named(id, where);
    if (count % kWarp || count <= 0 || count > threads_) {
      fail(where, "named barrier %d: %d threads is no multiple of a warp in the block", id, count);
    }
    if (bar.arrived == 0) {
      bar.expected = count;
      bar.gathering = fresh_view();
      bar.any = false;
    } else if (bar.expected != count) {
      fail(where, "named barrier %d: %d threads expected here, %d by others", id, count, bar.expected);
    }
    bar.gathering.join_with(view());
    bar.any = bar.any || any;
    tick();
    const std::uint64_t generation = bar.generation;
    if (++bar.arrived == count) {
      bar.arrived = 0;
      bar.any_released = bar.any;
      bar.released = bar.gathering;
      ++bar.generation;
    }
    return generation;
  }

  bool sync_named(int id, int count, const Where& where, bool any = false) {
    const std::uint64_t generation = arrive_named(id, count, where, any);
    NamedBarrier& bar = home().named[id];
    if (lane() == 0) event("barrier", where, {{"id", id}, {"threads", count}});
    block_until([&bar, generation] { return bar.generation != generation; },
                "named barrier " + std::to_string(id) + " for " + std::to_string(count) + " threads", where);
    if (lane() == 0) event("barrier passed", where, {{"id", id}});
    view().join_with(bar.released);
    return bar.any_released;
  }

  // The barrier of all threads of the cluster that have not exited, in two halves.
  void arrive_cluster(bool release, const Where& where) {
    if (current_->cluster_arrived) fail(where, "a second arrival at the cluster barrier, with no wait between");
    NamedBarrier& bar = cluster_barrier(current_->block);
    if (bar.arrived++ == 0) bar.gathering = fresh_view();
    if (release) {
      bar.gathering.join_with(view());
    } else if (current_->initialised) {
      bar.gathering.join_with(*current_->initialised);
    }
    tick();
    current_->cluster_arrived = true;
    current_->cluster_generation = bar.generation;
    event("cluster arrive", where);
    settle_cluster();
    maybe_yield();
  }

  void wait_cluster(const Where& where) {
    if (!current_->cluster_arrived) fail(where, "a wait at the cluster barrier without an arrival");
    event("cluster wait", where);
    NamedBarrier& bar = cluster_barrier(current_->block);
    block_until([&bar, generation = current_->cluster_generation] { return bar.generation != generation; },
                "the other threads of the cluster", where);
    current_->cluster_arrived = false;
    view().join_with(bar.released);
  }

  Mbarrier& mbarrier(std::uint32_t address, const Where& where) { return mbarrier(home(), address, where); }
  Mbarrier& mbarrier(Block& block, std::uint32_t address, const Where& where) {
    auto found = block.mbarriers.find(address);
    if (found == block.mbarriers.end()) fail(where, "no mbarrier was initialised at %u", address - kSharedBase);
    Mbarrier& bar = found->second;
    if (bar.init.actor != actor() && !has_seen(view().seen, bar.init.actor, bar.init.clock)) {
      fail(where, "the mbarrier at %u is used without an order behind its initialisation at %s", address - kSharedBase,
           place(bar.init.where).c_str());
    }
    return bar;
  }

  void init_mbarrier(std::uint32_t address, int count, const Where& where) {
    shared(address, 8, where);
    if (address % 8) fail(where, "misaligned mbarrier at %u", address - kSharedBase);
    auto& mbarriers = home().mbarriers;
    if (mbarriers.count(address)) fail(where, "the mbarrier at %u is initialised twice", address - kSharedBase);
    if (mbarriers.size() == kMaxBarriers) fail(where, "more than %d mbarriers", kMaxBarriers);
    Mbarrier bar;
    bar.actor = size_ * (threads_ + warps_) + current_->block * kMaxBarriers + static_cast<int>(mbarriers.size());
    bar.address = address - kSharedBase;
    bar.count = bar.pending = count;
    bar.init = {actor(), view().seen[actor()], Proxy::generic, where};
    bar.gathering = bar.completed = fresh_view();
    mbarriers.emplace(address, std::move(bar));
  }

  void fence_mbarriers() {
    for (auto& [address, bar] : home().mbarriers) {
      if (bar.init.actor == actor()) bar.fenced = true;
    }
    current_->initialised = view();
  }

  void arrive_mbarrier(std::uint32_t address, std::int64_t expect, const Where& where) {
    arrive_mbarrier(home(), address, expect, where);
  }
  void arrive_mbarrier(Block& block, std::uint32_t address, std::int64_t expect, const Where& where) {
    require_alive(block, where);
    Mbarrier& bar = mbarrier(block, address, where);
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

  bool test_mbarrier(std::uint32_t address, int parity, const Where& where) {
    Mbarrier& bar = mbarrier(address, where);
    maybe_yield();
    const bool ended = static_cast<int>(bar.phase & 1) != (parity & 1);
    if (ended) view().join_with(bar.completed);
    return ended;
  }

  // -- asynchronous copies into shared memory of a block of the cluster, counted on a barrier there
  void copy_async(Block& target, std::uint32_t bar_address, std::int64_t bytes, const Where& where,
                  const std::function<void(Access, const View&)>& write) {
    Mbarrier& bar = mbarrier(target, bar_address, where);
    if (!bar.fenced) fail(where, "the mbarrier at %u is not visible to TMA: fence its initialisation", bar_address - kSharedBase);
    const std::int64_t number = ++copies_issued_;
    event("copy", where, {{"copy", number}, {"mbarrier", bar.address}, {"phase", bar.phase}, {"bytes", bytes}});
    // Everything that lands in a phase becomes known together, when the phase ends: the phase is the actor's clock.
    const Access access{bar.actor, bar.phase + 1, Proxy::async, where};
    const View issued = view();
    copies_.push_back({[this, &target, &bar, bytes, number, access, issued, write] {
                         if (target.rank != current_->block) require_alive(target, access.where);
                         landing_ = event("landed", access.where, {{"copy", number}});
                         write(access, issued);
                         landing_ = nullptr;
                         bar.bytes -= bytes;
                         settle(bar, access.where);
                       },
                       current_});
    // What the thread does from here on is no longer ordered before the copy.
    tick();
    if (settings_.mode == 0) land_copy(copies_.size() - 1);
    maybe_yield();
  }

  // -- bulk stores: shared memory is read, and global memory written, some time between issue and wait
  void store_async(const Where& where, std::function<void(Access, const View&)> read, std::function<void(Access)> write) {
    StoreQueue& q = current_->stores;
    if (q.actor < 0) {
      q.actor = actors_ + 2 * static_cast<std::int32_t>(storers_.size());
      storers_.push_back(current_);
    }
    const Access reads{q.actor, q.groups + 1, Proxy::async, where};
    const Access writes{q.actor + 1, q.groups + 1, Proxy::async, where};
    auto store = std::make_shared<Store>();
    store->read = [this, reads, issued = view(), read = std::move(read)] {
      landing_ = event("store read", reads.where, {{"group", reads.clock}});
      read(reads, issued);
      landing_ = nullptr;
    };
    store->write = [writes, write = std::move(write)] { write(writes); };
    event("store", where, {{"group", reads.clock}});
    q.where = where;
    q.open.push_back(store);
    stores_.push_back({std::move(store), current_});
    tick();
    if (settings_.mode == 0) land_store(stores_.size() - 1, true);
    maybe_yield();
  }

  void commit_stores() {
    StoreQueue& q = current_->stores;
    q.committed.push_back(std::move(q.open));
    q.open.clear();
    ++q.groups;
  }

  // Waits until all groups but the newest `pending` have read shared memory or, `whole`, have written it out.
  void wait_stores(int pending, bool whole, const Where& where) {
    StoreQueue& q = current_->stores;
    if (q.actor < 0) return;
    for (std::size_t i = 0; i + pending < q.committed.size(); ++i) {
      for (auto& store : q.committed[i]) advance(*store, whole);
    }
    if (q.groups > static_cast<std::uint32_t>(pending)) {
      q.read = std::max(q.read, q.groups - pending);
      see(view().seen, q.actor, q.read);
      if (whole) see(view().seen, q.actor + 1, q.groups - pending);
      ++view().version;
    }
    if (whole) {
      while (q.committed.size() > static_cast<std::size_t>(pending)) q.committed.pop_front();
    }
    event(whole ? "store waited" : "store read waited", where, {{"pending", pending}});
    maybe_yield();
  }

  // -- WGMMA: one warp's share at a time
  TensorQueue& queue() { return home().queues[warp()]; }

  // Issues one operation of the warp; `first` is the warp's first thread. Its accesses are those of an actor of its own,
  // which knows what the 32 lanes knew.
  void issue_matmul(const Where& where, std::function<void(Access, const View&)> compute, std::function<void()> finish) {
    TensorQueue& q = queue();
    if (!q.fenced) fail(where, "wgmma without a wgmma fence since the registers were last in use");
    bool changed = q.view == nullptr;
    for (int i = 0; i < kWarp; ++i) changed |= q.joined[i] != lane_of_warp(i).view.version;
    if (changed) {
      auto joined = std::make_shared<View>(q.view ? *q.view : fresh_view());
      for (int i = 0; i < kWarp; ++i) {
        const View& lane = lane_of_warp(i).view;
        joined->join_with(lane);
        q.joined[i] = lane.version;
      }
      q.view = std::move(joined);
      // What the lanes do from here on is no longer ordered before this operation, nor before those that follow with the
      // same view: the versions stay. A write to an operand of a later one needs a fence, which gives a new version.
      for (int i = 0; i < kWarp; ++i) ++lane_of_warp(i).view.seen[actor() - lane() + i];
    }
    const Access access{tensor_actor(), ++q.clock, Proxy::async, where};
    event("wgmma", where, {{"operation", q.clock}});
    q.open.push_back({[this, access, view = q.view, compute = std::move(compute)] {
                        landing_ = event("wgmma landed", access.where, {{"operation", access.clock}});
                        compute(access, *view);
                        landing_ = nullptr;
                      },
                      std::move(finish)});
    if (settings_.mode == 0) land(q.open.back());
  }

  // The four warps of a warpgroup issue a wgmma together: each its share of the same one, in the same order. Called before
  // issue_matmul.
  void match_matmul(const Where& where, std::uint64_t a, std::uint64_t b, int n, bool accumulate) {
    const int first = warp() / 4 * 4;
    Warpgroup& group = home().warpgroups[warp() / 4];
    const std::size_t at = queue().clock - group.before;
    if (at == group.issued.size()) {
      group.issued.push_back({where, a, b, n, accumulate});
    } else {
      const Together& other = group.issued[at];
      const bool same_place = other.where.line() == where.line() && other.where.file_name() == where.file_name();
      if (!same_place || other.a != a || other.b != b || other.n != n || other.accumulate != accumulate) {
        fail(where, "the warps of a warpgroup issue different wgmma: this one, and another the one at %s", place(other.where).c_str());
      }
    }
    bool all = at == 0;
    for (int w = first; w < first + 4; ++w) all = all && (w == warp() || home().queues[w].clock > group.before);
    if (all) {
      group.issued.pop_front();
      ++group.before;
    }
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
      for (Matmul& m : q.committed.front().operations) m.finish();
      q.done = q.committed.front().last_clock;
      q.committed.pop_front();
    }
    q.fenced = false;
    event("wgmma waited", where, {{"operation", q.done}});
  }

  // What a lane knows after the wait.
  void see_matmuls() {
    view().seen[tensor_actor()] = queue().done;
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
  // Reads of an unchanged word after which a thread counts as waiting for it.
  static constexpr int kPatience = 1000;

  std::size_t stack_bytes() const { return kStack * threads_ * size_; }

  void allocate_stacks() {
    void* memory = mmap(nullptr, stack_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      fault_ = "no memory for the stacks of the threads";
    } else {
      stacks_ = static_cast<unsigned char*>(memory);
    }
  }

  bool tracing() const {
    const std::uint32_t* b = settings_.trace_block;
    return settings_.trace && current_ && block().x == b[0] && block().y == b[1] && block().z == b[2];
  }

  void trace_access(std::uint32_t offset, std::uint32_t bytes, bool write, const Access& access) {
    TraceEvent* into = landing_;
    if (access.proxy == Proxy::generic) {
      TraceEvent*& open = open_accesses_[{warp(), write, access.where.line(), access.where.file_name()}];
      if (!open) {
        ++steps_;
        trace_.push_back({steps_ - first_step_, 0, access.actor % threads_, write ? "write" : "read", access.where, "", {}});
        open = &trace_.back();
      }
      open->until = steps_ - first_step_;
      into = open;
    }
    if (!into) return;
    for (std::uint32_t line = offset / kTraceLine; line <= (offset + bytes - 1) / kTraceLine; ++line) into->lines.insert(line);
  }

  // The blocks of the cluster `number_`, or all.
  void run_blocks() {
    first_step_ = steps_;
    open_accesses_.clear();
    const float unwritten = as_float(kUnwritten);
    blocks_.assign(size_, Block{});
    for (int rank = 0; rank < size_; ++rank) {
      Block& block = blocks_[rank];
      block.rank = rank;
      block.index = block_index(settings_.cooperative ? rank / cluster_size_ : static_cast<unsigned>(number_),
                                static_cast<unsigned>(rank % cluster_size_));
      block.smem.resize(smem_bytes_);
      for (std::uint32_t i = 0; i + 4 <= smem_bytes_; i += 4) std::memcpy(&block.smem[i], &unwritten, 4);
      block.shadow.assign(smem_bytes_ / 4 + 1, Shadow{});
      block.marked.assign(smem_bytes_ / 4 + 1, 1);
      block.named.assign(16, NamedBarrier{});
      block.gatherings.assign(warps_, Gathering{});
      block.queues.assign(warps_, TensorQueue{});
      block.warpgroups.assign((warps_ + 3) / 4, Warpgroup{});
    }
    origins_.clear();
    copies_.clear();
    stores_.clear();
    storers_.clear();
    cluster_barriers_.assign(size_ / cluster_size_, NamedBarrier{});
    alive_in_cluster_.assign(size_ / cluster_size_, cluster_size_ * threads_);
    fibers_.clear();
    for (int i = 0; i < size_ * threads_; ++i) {
      auto fiber = std::make_unique<Fiber>();
      fiber->block = i / threads_;
      fiber->thread = i % threads_;
      fiber->view = fresh_view();
      fiber->view.seen[i] = 1;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = stacks_ + kStack * i;
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Machine::enter), 0);
      fibers_.push_back(std::move(fiber));
    }
    alive_ = size_ * threads_;
    schedule();
    if (!fault_.empty()) return;
    for (const Block& block : blocks_) {
      current_ = fibers_[block.rank * threads_].get();
      for (const TensorQueue& q : block.queues) {
        if (q.open.empty() && q.committed.empty()) continue;
        report(Where::current(), "a warp ends with wgmma that nobody waited for");
        return;
      }
      for (const auto& [address, bar] : block.mbarriers) {
        if (bar.bytes == 0) continue;
        report(bar.init.where, ("the mbarrier at " + std::to_string(address - kSharedBase) + " ends with " +
                                std::to_string(bar.bytes) + " bytes that were expected and not copied").c_str());
        return;
      }
    }
    current_ = nullptr;
  }

  Dim3 block_index(unsigned cluster, unsigned rank) const {
    const unsigned x = grid_.x / cluster_.x, y = grid_.y / cluster_.y;
    return {cluster % x * cluster_.x + rank % cluster_.x, cluster / x % y * cluster_.y + rank / cluster_.x % cluster_.y,
            cluster / x / y * cluster_.z + rank / cluster_.x / cluster_.y};
  }

  // At the end of a thread.
  void finish() {
    Fiber& self = *current_;
    if (!self.stores.open.empty() || self.stores.read < self.stores.groups) {
      fail(self.stores.where, "a thread ends with bulk stores whose reading nobody waited for");
    }
    if (self.cluster_arrived) fail(Where::current(), "a thread ends between arrival and wait at the cluster barrier");
    self.finished = true;
    --alive_;
    --alive_in_cluster_[self.block / cluster_size_];
    settle_cluster();
  }

  void schedule() {
    std::vector<Fiber*> runnable;
    while (fault_.empty()) {
      runnable.clear();
      for (auto& fiber : fibers_) {
        if (!fiber->finished && (!fiber->ready || fiber->ready())) runnable.push_back(fiber.get());
      }
      if (alive_ == 0) {
        while (!copies_.empty() && fault_.empty()) attempt([this] { land_copy(random_() % copies_.size()); });
        while (!stores_.empty() && fault_.empty()) attempt([this] { land_store(random_() % stores_.size(), true); });
        return;
      }
      if (settings_.mode == 2) attempt([this] { land_some_matmuls(); });
      if (!stores_.empty() && (runnable.empty() || (settings_.mode == 2 && random_() % 4 == 0))) {
        attempt([this, all = runnable.empty()] { land_store(random_() % stores_.size(), all || random_() % 2 == 0); });
        if (runnable.empty()) continue;
      }
      if (!copies_.empty() && (runnable.empty() || (settings_.mode == 2 && random_() % 4 == 0))) {
        attempt([this] { land_copy(random_() % copies_.size()); });
        if (runnable.empty()) continue;
      }
      if (runnable.empty()) {
        if (fault_.empty()) deadlock();
        return;
      }
      // One warp at a time, in an order of the seed: its lanes run until each has to wait.
      const Fiber* chosen = runnable[random_() % runnable.size()];
      for (Fiber* fiber : runnable) {
        if (fiber->block != chosen->block || fiber->thread / kWarp != chosen->thread / kWarp || !fault_.empty()) continue;
        ++steps_;
        resume(*fiber);
      }
    }
  }

  // Runs what may fail on behalf of a thread that is not running.
  template <class F>
  void attempt(F operation) {
    Fiber* const before = current_;
    if (_setjmp(scheduler_) == 0) operation();
    current_ = before;
  }

  void land_copy(std::size_t i) {
    Copy copy = std::move(copies_[i]);
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
    Fiber* const before = current_;
    current_ = copy.fiber;
    copy.land();
    current_ = before;
  }

  // Takes a bulk store further: it reads, and if it is to be `whole` also writes.
  static void advance(Store& store, bool whole) {
    if (store.read) std::exchange(store.read, nullptr)();
    if (whole && store.write) std::exchange(store.write, nullptr)();
  }

  void land_store(std::size_t i, bool whole) {
    const auto [store, fiber] = stores_[i];
    Fiber* const before = current_;
    current_ = fiber;
    advance(*store, whole);
    current_ = before;
    if (!store->write) stores_.erase(stores_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  static void land(Matmul& m) {
    if (!m.land) return;
    const std::function<void()> operation = std::move(m.land);
    m.land = nullptr;
    operation();
  }

  void land_some_matmuls() {
    const int w = static_cast<int>(random_() % (warps_ * size_));
    Block& block = blocks_[w / warps_];
    for (MatmulGroup& group : block.queues[w % warps_].committed) {
      for (Matmul& m : group.operations) {
        if (!m.land) continue;
        if (random_() % 3 == 0) return;
        Fiber* const before = current_;
        current_ = fibers_[block.rank * threads_ + w % warps_ * kWarp].get();
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
    bar.gathering.seen[bar.actor] = bar.phase;
    bar.completed.join_with(bar.gathering);
  }

  NamedBarrier& cluster_barrier(int rank) { return cluster_barriers_[rank / cluster_size_]; }

  void settle_cluster() {
    NamedBarrier& bar = cluster_barrier(current_->block);
    if (bar.arrived == 0 || bar.arrived < alive_in_cluster_[current_->block / cluster_size_]) return;
    bar.arrived = 0;
    bar.released = bar.gathering;
    ++bar.generation;
  }

  // Reaching for the shared memory of a block needs that block to be there.
  void require_alive(const Block& block, const Where& where) {
    if (cluster_size_ == 1) return;
    for (int t = 0; t < threads_; ++t) {
      if (!fibers_[block.rank * threads_ + t]->finished) return;
    }
    fail(where, "access to shared memory of the block%s, which has exited", of_block(block.rank).c_str());
  }

  // What the running thread hands over by a release.
  Released released() const {
    Released r;
    if (current_->view.others) r.seen = *current_->view.others;
    join(r.seen[number_], current_->view.seen);
    join(r.fenced[number_], current_->view.fenced);
    return r;
  }

  void take_over(const Released& found) {
    View& mine = view();
    if (auto own = found.seen.find(number_); own != found.seen.end()) join(mine.seen, own->second);
    if (auto own = found.fenced.find(number_); own != found.fenced.end()) join(mine.fenced, own->second);
    mine.join_others(std::make_shared<const Clocks>(found.seen));
    ++mine.version;
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
    const bool ordered = has_seen(view.seen, before.actor, before.clock);
    const bool crosses = before.proxy == Proxy::generic && now.proxy == Proxy::async && std::strcmp(kind, "write") == 0;
    if (ordered && (!crosses || has_seen(view.fenced, before.actor, before.clock))) return;
    char text[512];
    std::snprintf(text, sizeof text, "shared memory race at byte %u: this %s%s by %s, and the %s%s by %s at %s, %s", word * 4,
                  now.proxy == Proxy::async ? "asynchronous " : "", write ? "write" : "read", actor_name(now.actor).c_str(),
                  before.proxy == Proxy::async ? "asynchronous " : "", kind, actor_name(before.actor).c_str(),
                  place(before.where).c_str(),
                  ordered ? "have no fence.proxy.async between them" : "are not ordered by any barrier or wait");
    report(now.where, text);
    abandon();
  }

  std::string actor_name(int actor) const {
    if (actor >= actors_) {
      const Fiber& storer = *storers_[(actor - actors_) / 2];
      return "a bulk store of thread " + std::to_string(storer.thread) + of_block(storer.block);
    }
    if (actor < size_ * threads_) {
      const int thread = actor % threads_;
      return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / kWarp) + ")" + of_block(actor / threads_);
    }
    actor -= size_ * threads_;
    if (actor < size_ * warps_) return "wgmma of warp " + std::to_string(actor % warps_) + of_block(actor / warps_);
    actor -= size_ * warps_;
    return "TMA on mbarrier " + std::to_string(actor % kMaxBarriers) + of_block(actor / kMaxBarriers);
  }
  std::string of_block(int rank) const {
    if (size_ == 1) return "";
    if (size_ == cluster_size_) return " of rank " + std::to_string(rank);
    const Dim3& at = blocks_[rank].index;
    return " of block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
  }

  void report(const Where& where, const char* text) {
    if (!fault_.empty()) return;
    const Dim3 at = block();
    fault_ = place(where) + ": block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
             "), warp " + std::to_string(warp()) + ", thread " + std::to_string(thread()) + ": ";
    fault_ += text;
  }

  void deadlock() {
    std::map<std::string, std::vector<std::string>> waiting;
    const Fiber* first = nullptr;
    for (const auto& fiber : fibers_) {
      if (fiber->finished) continue;
      if (!first) first = fiber.get();
      const std::string warp = std::to_string(fiber->thread / kWarp) + of_block(fiber->block);
      auto& warps = waiting[place(fiber->waiting_at) + " waits for " + fiber->waiting_for];
      if (warps.empty() || warps.back() != warp) warps.push_back(warp);
    }
    std::string text = "deadlock:";
    for (const auto& [what, warps] : waiting) {
      text += "\n  warp";
      for (const std::string& warp : warps) text += " " + warp;
      text += " at " + what;
    }
    for (const Block& block : blocks_) {
      for (const auto& [address, bar] : block.mbarriers) {
        text += "\n  mbarrier at " + std::to_string(address - kSharedBase) + of_block(block.rank) + ": phase " +
                std::to_string(bar.phase) + ", " + std::to_string(bar.pending) + " of " + std::to_string(bar.count) +
                " arrivals and " + std::to_string(bar.bytes) + " bytes missing";
      }
      for (std::size_t id = 0; id < block.named.size(); ++id) {
        if (block.named[id].arrived) {
          text += "\n  named barrier " + std::to_string(id) + of_block(block.rank) + ": " +
                  std::to_string(block.named[id].arrived) + " of " + std::to_string(block.named[id].expected) + " threads";
        }
      }
    }
    for (std::size_t i = 0; i < cluster_barriers_.size(); ++i) {
      if (!cluster_barriers_[i].arrived) continue;
      text += "\n  cluster barrier: " + std::to_string(cluster_barriers_[i].arrived) + " of " +
              std::to_string(alive_in_cluster_[i]) + " threads";
    }
    current_ = fibers_[first->block * threads_ + first->thread].get();
    report(first->waiting_at, text.c_str());
  }

  const Origin& origin(Mark mark) const { return origins_[mark - kFirstMark]; }
  bool has_origin(std::uint16_t element) const {
    return element >= kFirstMark && element < kFirstMark + static_cast<int>(origins_.size());
  }
  // Of an element in a flagged word.
  bool is_mark(std::uint16_t element) const { return element == kUnwritten || has_origin(element); }

  // Nobody has read it as a number so far.
  bool is_raw(Mark mark) const { return mark == kUnwritten || origin(mark).copy; }

  // The mark of an origin; `describe` gives its text, if it is new.
  template <class F>
  Mark make_mark(Origin made, F describe) {
    constexpr std::size_t kMarks = kLastMark - kFirstMark + 1;
    std::size_t i = 0;
    for (; i < origins_.size(); ++i) {
      const Origin& o = origins_[i];
      const bool same_place = o.where.line() == made.where.line() && o.where.file_name() == made.where.file_name();
      if (same_place && o.actor == made.actor && o.from == made.from) break;
    }
    if (i == origins_.size() && i < kMarks) {
      made.text = describe();
      origins_.push_back(std::move(made));
    }
    // Only a kernel that reads what is undefined everywhere has more origins than there are marks: the last serves for all.
    return static_cast<Mark>(kFirstMark + std::min(i, kMarks - 1));
  }

  std::string who() const {
    const Dim3 at = block();
    return "warp " + std::to_string(warp()) + " of block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
           std::to_string(at.z) + ")";
  }

  // What is wrong with a mark, where it lies in shared memory at `address`.
  std::string describe(Mark mark, std::uint32_t address) const {
    const std::string byte = "byte " + std::to_string(address - kSharedBase) + " of shared memory";
    if (mark == kUnwritten) return byte + ", which is uninitialised so far";
    const std::string& text = origin(mark).text;
    return is_raw(mark) ? byte + ", which is uninitialised (" + text + ")" : "what is undefined (" + text + ")";
  }

  const Region& region_of(const void* pointer) const {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    return *std::find_if(regions_.begin(), regions_.end(), [address](const Region& region) {
      return address >= region.address && address < region.address + region.bytes;
    });
  }

  // Words of global memory and who wrote them last: another block of the same kernel must not touch them without an order
  // that atomics or its cluster's barriers make, nobody before an asynchronous write was waited for, nor a kernel that runs
  // ahead of its predecessor's end; and what has no writer is undefined. Kept across the launches of a call by the host
  // process, for the libraries of two kernels share no variables.
  struct Writer {
    std::int32_t kernel;
    std::uint64_t cluster;
    int rank;
    Access access;
    bool atomic;
  };
  using Writers = std::unordered_map<std::uint64_t, Writer>;
  static Writers& kept_writers(const Settings& settings) {
    if (!*settings.writers) *settings.writers = new Writers;
    return *static_cast<Writers*>(*settings.writers);
  }

  bool knows_of(const Writer& w) const {
    const View& mine = current_->view;
    if (w.cluster == number_) return has_seen(mine.seen, w.access.actor, w.access.clock);
    if (!mine.others) return false;
    const auto found = mine.others->find(w.cluster);
    return found != mine.others->end() && has_seen(found->second, w.access.actor, w.access.clock);
  }

  // Whether a word that is read has no writer.
  bool track_global(std::uint64_t address, std::uint64_t bytes, bool write, const Region& region, const Where& where,
                    const Manner& manner) {
    if (!region.writable) return false;
    bool unwritten = false;
    const Access access = manner.async ? *manner.async : Access{actor(), view().seen[actor()], Proxy::generic, where};
    for (std::uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
      auto found = writers_.find(word);
      if (found != writers_.end()) {
        const Writer& w = found->second;
        const bool elsewhere = w.cluster != number_ || w.rank != current_->block;
        const bool settled = (w.atomic && manner.atomic) || (manner.async && w.access.actor == access.actor);
        if (w.kernel == settings_.kernel && (elsewhere || w.access.proxy == Proxy::async) && !settled && !knows_of(w)) {
          fail(where, "%s is %s here and was written by %s at %s", region.name, write ? "written" : "read",
               elsewhere ? "another block of this kernel" : "a bulk store that nobody waited for,",
               place(w.access.where).c_str());
        }
        if (settings_.overlap && w.kernel == settings_.kernel - 1 && !current_->overlap_waited) {
          fail(where, "%s was written by the kernel before, at %s, and this thread has not waited for its end", region.name,
               place(w.access.where).c_str());
        }
      } else if ((!write || manner.atomic) && !region.defined) {
        unwritten = true;
      }
      if (write) writers_[word] = {settings_.kernel, number_, current_->block, access, manner.atomic};
    }
    return unwritten;
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
  Dim3 cluster_;
  int cluster_size_;  // blocks of a cluster
  int size_;          // blocks that run together
  int threads_;  // of a block, like the warps
  int warps_;
  int actors_;
  std::uint32_t smem_bytes_;
  std::vector<Region> regions_;
  Writers& writers_;
  const std::function<void()>* kernel_ = nullptr;

  std::uint64_t number_ = 0;  // of the cluster that runs; 0 if all do
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  int alive_ = 0;  // threads
  std::vector<int> alive_in_cluster_;
  unsigned char* stacks_ = nullptr;
  Fiber* current_ = nullptr;
  jmp_buf scheduler_;
  std::uint64_t steps_ = 0;
  std::string fault_;
  std::vector<Origin> origins_;  // of the marks from kFirstMark on

  std::vector<Copy> copies_;
  struct StoreInFlight {
    std::shared_ptr<Store> store;
    Fiber* fiber;
  };
  std::vector<StoreInFlight> stores_;
  std::vector<Fiber*> storers_;
  std::vector<NamedBarrier> cluster_barriers_;
  std::unordered_map<std::uint64_t, Released> atomics_;

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
  machine->finish();
  machine->abandon();
}

}  // namespace mlaforge::sim
