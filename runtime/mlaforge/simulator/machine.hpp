// A small machine that runs the kernels' text on a CPU: the threads of a cluster's blocks as fibers, shared memory with a
// record of who touched what, barriers, and asynchronous operations that land when a seed says so.
//
// It is no model of a GPU's speed. What it keeps is the part of the memory model that the kernels lean on: an order
// between two accesses exists only where barriers, waits and fences make one. Every thread carries a vector clock of
// what it has seen; asynchronous operations are actors of their own.
//
// What is here is compiled with every kernel; the larger part, machine.cpp, once for all of them.
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
constexpr int kMaxBarriers = 96;
constexpr std::uint32_t kSharedBase = 1024;  // the hardware keeps the first KiB of the window for itself

// ---- Vector clocks -----------------------------------------------------------------------------------------------

using Clock = std::vector<std::uint32_t>;

// Actors that appear late (bulk stores) lie behind the end of older clocks, which count as zero there.
void join(Clock& into, const Clock& other);
inline bool has_seen(const Clock& clock, std::int32_t actor, std::uint32_t time) {
  return static_cast<std::size_t>(actor) < clock.size() && clock[actor] >= time;
}
inline void see(Clock& clock, std::int32_t actor, std::uint32_t time) {
  if (static_cast<std::size_t>(actor) >= clock.size()) clock.resize(actor + 1, 0);
  clock[actor] = std::max(clock[actor], time);
}

// Clocks of clusters, by the number of the cluster.
using Clocks = std::map<std::uint64_t, Clock>;

void join(Clocks& into, const Clocks& other);

// What an actor has seen of its own cluster, and of that, which plain writes are visible to the async proxy; and what
// atomics told it of other clusters.
struct View {
  Clock seen;
  Clock fenced;
  std::uint64_t version = 0;  // changes whenever the view does
  std::shared_ptr<const Clocks> others;
  void join_with(const View& other);
  void join_others(const std::shared_ptr<const Clocks>& more);
};

// What a release hands over: the views of those who released, by cluster.
struct Released {
  Clocks seen;
  Clocks fenced;
  void join_with(const Released& other);
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

// A thread's copies of 16 bytes. All that an arrival of theirs covers land together, groups in their order; their writes are
// an actor, whose clock is the number of the group.
struct Mbarrier;
struct CopyGroup {
  struct Piece {
    std::uint32_t to;
    const void* from;
    Where where;
    std::shared_ptr<const View> issued;
  };
  std::vector<Piece> pieces;
  std::uint32_t number = 0;
  Mbarrier* bar = nullptr;  // null: the thread itself waits
  Where where = Where::current();
  View view;  // of the thread at the arrival
  std::int64_t traced = 0;
  bool landed = false;
};
struct CopyQueue {
  std::int32_t actor = -1;
  std::vector<CopyGroup::Piece> open;
  std::deque<std::shared_ptr<CopyGroup>> closed;  // and not landed
  std::uint32_t groups = 0;
  std::shared_ptr<const View> issued;  // what the thread knew when it started the last one
  std::uint64_t version = 0;           // of its view since then
  bool waited = true;
  Where where = Where::current();  // of the last copy
};

struct Fiber {
  std::function<bool()> ready;  // empty: runnable; first, with the next: asked at every step
  bool finished = false;
  bool started = false;
  ucontext_t context;
  jmp_buf jump;
  bool overlap_waited = false;
  bool cluster_arrived = false;
  std::uint64_t cluster_generation = 0;
  int block = 0;   // rank in the cluster
  int thread = 0;  // in the block
  View view;
  StoreQueue stores;
  CopyQueue copies;
  Released fenced;    // what its last fence hands over to its relaxed atomics
  Released gathered;  // what its relaxed atomics found, for the next fence to take over
  const void* polled = nullptr;  // the word that it reads again and again, what it finds there, and how often
  std::int32_t polled_value = 0;
  int polls = 0;
  std::function<std::string()> waiting_for;
  Where waiting_at = Where::current();
};

// A collective of the 32 lanes of a warp that is being gathered.
struct Gathering {
  bool exited = false;  // some lane has
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
          std::vector<Region> regions);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Runs every block of the grid; the text of the first fault, empty if there was none.
  std::string run(const std::function<void()>& kernel);

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
  [[noreturn]] void fail(const Where& where, const char* format, ...) __attribute__((format(printf, 3, 4)));

  // -- waiting
  // `what` names what is waited for, should it never come.
  void block_until(std::function<bool()> ready, std::function<std::string()> what, const Where& where);

  // A point at which another thread may go first.
  void maybe_yield() {
    if (random_() % 8 == 0) yield();
  }

  // -- collectives of a warp: `last` runs once, when all lanes have arrived, with what each brought.
  void gather(const char* what, const Where& where, void* mine, const std::function<void(void* const*)>& last);
  // All of them have seen what each has.
  void sync_warp(const Where& where);

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
  void touch(std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view);
  void touch(Block& block, std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view);

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
  // Takes the flag from a word whose first bytes a copy has written: what others it brings may set it again.
  void unflag_marked(Block& to, std::uint32_t address) { to.marked[(address - kSharedBase) / 4] = 0; }

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
  Mark take_mark(std::uint16_t element, std::uint32_t address, const Access& access);

  // The mark of the accumulators of a wgmma of the running warp.
  Mark mark_in_flight(const Where& where);

  // Puts marks in place of what a copy brought from global memory that nobody has written.
  void copy_mark(Block& to, std::uint32_t address, std::uint32_t bytes, const Access& access, const void* from);

  // Refuses to read, as a number, what nobody has written; what was computed of such may be read as a float32.
  void require_defined_load(std::uint32_t address, const unsigned char* p, bool is_float, const Where& where);

  // Refuses to store to global memory what comes from memory that nobody has written: from registers, and from shared
  // memory.
  void require_defined(Mark mark, const void* to, const Where& where);
  void require_defined_copy(std::uint32_t address, std::uint32_t bytes, const void* to, const Where& where);

  // -- global memory

  // Whether nobody has written some of what is read; only an access that copies may read it.
  bool global(const void* pointer, std::uint64_t bytes, bool write, const Where& where, Manner manner = {});

  // -- atomics: between clusters, and between threads, nothing else makes an order in global memory

  // What is known of a word that atomics change, taken over and handed over by an atomic of the running thread. It is
  // `acquire` and `release`, or relaxed, for fences to complete.
  void atomic(const void* pointer, bool acquire, bool release);

  void fence_gpu();

  // The running thread reads `value` at an atomic word without changing it. After many times it waits for a change, so
  // that a loop around it ends in a deadlock that can be reported.
  void poll(const std::int32_t* word, std::int32_t value, const Where& where);

  // -- barriers
  NamedBarrier& named(int id, const Where& where);

  // Arrives; the generation that will release this arrival.
  std::uint64_t arrive_named(int id, int count, const Where& where, bool any = false);

  bool sync_named(int id, int count, const Where& where, bool any = false);

  // The barrier of all threads of the cluster that have not exited, in two halves.
  void arrive_cluster(const Where& where);

  void wait_cluster(const Where& where);

  Mbarrier& mbarrier(std::uint32_t address, const Where& where) { return mbarrier(home(), address, where); }
  Mbarrier& mbarrier(Block& block, std::uint32_t address, const Where& where);

  void init_mbarrier(std::uint32_t address, int count, const Where& where);

  void fence_mbarriers();

  void arrive_mbarrier(std::uint32_t address, std::int64_t expect, const Where& where);
  void arrive_mbarrier(Block& block, std::uint32_t address, std::int64_t expect, const Where& where);

  void wait_mbarrier(std::uint32_t address, int parity, const Where& where);

  bool test_mbarrier(std::uint32_t address, int parity, const Where& where);

  // -- asynchronous copies into shared memory of a block of the cluster, counted on a barrier there
  void copy_async(Block& target, std::uint32_t bar_address, std::int64_t bytes, const Where& where,
                  const std::function<void(Access, const View&)>& write);

  // -- copies by a single thread, which write by the generic proxy
  void copy_alone(std::uint32_t to, const void* from, const Where& where);

  // Arrives when all of the thread's copies so far have landed.
  void arrive_copied(std::uint32_t address, const Where& where);

  // Lands them.
  void wait_copied(const Where& where);

  // -- bulk stores: shared memory is read, and global memory written, some time between issue and wait
  void store_async(const Where& where, std::function<void(Access, const View&)> read, std::function<void(Access)> write);

  void commit_stores();

  // Waits until all groups but the newest `pending` have read shared memory or, `whole`, have written it out.
  void wait_stores(int pending, bool whole, const Where& where);

  // -- WGMMA: one warp's share at a time
  TensorQueue& queue() { return home().queues[warp()]; }

  // Issues one operation of the warp; `first` is the warp's first thread. Its accesses are those of an actor of its own,
  // which knows what the 32 lanes knew.
  void issue_matmul(const Where& where, std::function<void(Access, const View&)> compute, std::function<void()> finish);

  // The four warps of a warpgroup issue a wgmma together: each its share of the same one, in the same order. Called before
  // issue_matmul.
  void match_matmul(const Where& where, std::uint64_t a, std::uint64_t b, int n, bool accumulate);

  void commit_matmuls(const Where& where);

  // Lands every group of the warp but the newest `pending`.
  void wait_matmuls(int pending, const Where& where);

  // What a lane knows after the wait.
  void see_matmuls();

  std::mt19937_64& random() { return random_; }
  static std::string place(const Where& where);

  // Records an event of the running thread, if its block is traced. An event is a step of its own, so that their order
  // shows.
  TraceEvent* event(const char* what, const Where& where, TraceArguments arguments = {});

 private:
  static constexpr std::size_t kStack = 128 << 10;
  // Reads of an unchanged word after which a thread counts as waiting for it.
  static constexpr int kPatience = 1000;

  std::size_t stack_bytes() const { return kStack * threads_ * size_; }

  void allocate_stacks();

  bool tracing() const {
    const std::uint32_t* b = settings_.trace_block;
    return settings_.trace && current_ && block().x == b[0] && block().y == b[1] && block().z == b[2];
  }

  void trace_access(std::uint32_t offset, std::uint32_t bytes, bool write, const Access& access);

  // The blocks of the cluster `number_`, or all.
  void run_blocks();

  Dim3 block_index(unsigned cluster, unsigned rank) const;

  // At the end of a thread.
  void finish();

  void schedule();

  // Runs what may fail on behalf of a thread that is not running.
  template <class F>
  void attempt(F operation) {
    Fiber* const before = current_;
    if (_setjmp(scheduler_) == 0) operation();
    current_ = before;
  }

  void land_copy(std::size_t i);

  // Number of a thread's actor beside itself, of its own kind.
  std::int32_t add_actor(const char* what);

  // Closes the thread's open copies as a group.
  std::shared_ptr<CopyGroup> close_copies(const Where& where);

  // Lands a thread's groups up to this one.
  void land_group(Fiber& fiber, const CopyGroup& last);

  // Takes a bulk store further: it reads, and if it is to be `whole` also writes.
  static void advance(Store& store, bool whole);

  void land_store(std::size_t i, bool whole);

  static void land(Matmul& m);

  void land_some_matmuls();

  void settle(Mbarrier& bar, const Where& where);

  NamedBarrier& cluster_barrier(int rank) { return cluster_barriers_[rank / cluster_size_]; }

  void settle_cluster();

  // Reaching for the shared memory of a block needs that block to be there.
  void require_alive(const Block& block, const Where& where);

  // What the running thread hands over by a release.
  Released released() const;

  void take_over(const Released& found);

  void resume(Fiber& fiber);

  void yield() {
    if (_setjmp(current_->jump) == 0) _longjmp(scheduler_, 1);
  }

  [[noreturn]] void abandon() { _longjmp(scheduler_, 1); }

  static void enter();

  void require_order(const Access& before, const char* kind, const Access& now, bool write, const View& view,
                     std::uint32_t word);

  std::string actor_name(int actor) const;
  std::string of_block(int rank) const;

  void report(const Where& where, const char* text);

  void deadlock();

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

  std::string who() const;

  // What is wrong with a mark, where it lies in shared memory at `address`.
  std::string describe(Mark mark, std::uint32_t address) const;

  const Region& region_of(const void* pointer) const;

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
  static Writers& kept_writers(const Settings& settings);

  bool knows_of(const Writer& w) const;

  // Whether a word that is read has no writer.
  bool track_global(std::uint64_t address, std::uint64_t bytes, bool write, const Region& region, const Where& where,
                    const Manner& manner);

  void write_trace() const;

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
  // Actors that appear late: what they are, and of which thread.
  std::vector<std::pair<const char*, Fiber*>> late_actors_;
  std::vector<NamedBarrier> cluster_barriers_;
  std::unordered_map<std::uint64_t, Released> atomics_;

  std::deque<TraceEvent> trace_;  // whose elements stay where they are
  std::map<std::tuple<int, bool, std::uint32_t, const char*>, TraceEvent*> open_accesses_;  // by warp
  TraceEvent* landing_ = nullptr;  // of the asynchronous operation that is landing
  std::uint64_t first_step_ = 0;   // of the block
  std::int64_t copies_issued_ = 0;
};

extern Machine* machine;

// Runs a kernel; the text of the first fault goes to `fault`, and 1 is the result if there was one.
int launch(const std::function<void()>& kernel, const Settings& settings, Dim3 grid, Dim3 cluster, int threads,
           std::uint32_t smem, std::vector<Region> regions, char* fault, std::size_t fault_size);


}  // namespace mlaforge::sim
