#include "plan_ops.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <stdexcept>
#include <tuple>
#include <unordered_set>

namespace jturnip {

namespace {

// So many buffers are looked at for one that may leave ahead of time.
constexpr size_t kFew = 64;
constexpr OpId kNone = -1;

// Moves the first bytes of some ranges behind others.
void Cut(Ranges& ranges, int64_t nbytes, Ranges& taken) {
  if (ranges.empty()) return;
  size_t at = 0;
  for (; at < ranges.size() && ranges[at].second <= nbytes; ++at) {
    nbytes -= ranges[at].second;
    taken.push_back(ranges[at]);
  }
  if (nbytes > 0) {
    taken.emplace_back(ranges[at].first, nbytes);
    ranges[at].first += nbytes;
    ranges[at].second -= nbytes;
  }
  ranges.erase(ranges.begin(),
               ranges.begin() + static_cast<std::ptrdiff_t>(at));
}

// The same bytes in the fewest ranges, sorted.
Ranges Coalesced(Ranges ranges) {
  if (ranges.size() < 2) return ranges;
  std::sort(ranges.begin(), ranges.end());
  Ranges merged;
  for (const auto& range : ranges) {
    if (!merged.empty() &&
        merged.back().first + merged.back().second == range.first) {
      merged.back().second += range.second;
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

// Bytes that were taken, and the distinct ops that freed them.
struct Slot {
  Ranges ranges;
  std::vector<OpId> freers;
};

// Free blocks in the order in which they are freed, as planner/allocator.py.
class Arena {
 public:
  Arena(int64_t nbytes, bool with_addresses) : nbytes_(nbytes) {
    Ranges all;
    if (with_addresses) all.emplace_back(0, nbytes);
    Free(std::move(all), nbytes, kNone, 0.0);
  }

  int64_t nbytes() const { return nbytes_; }
  int64_t free_bytes() const { return free_bytes_; }

  void Free(Ranges ranges, int64_t nbytes, OpId freed_by, double seconds) {
    if (nbytes == 0) return;
    Add({seconds, ++count_}, {std::move(ranges), nbytes, freed_by});
    free_bytes_ += nbytes;
  }

  Slot Take(int64_t nbytes) {
    if (nbytes > free_bytes_)
      throw std::runtime_error("more taken than is free");
    Slot slot;
    if (nbytes == 0) return slot;
    free_bytes_ -= nbytes;
    const std::optional<Key> whole = OldestOfSize(nbytes);
    int64_t total = 0;
    auto last = blocks_.begin();
    for (;; ++last) {
      if (whole && last->first == *whole) {
        Take(last->second, slot);
        blocks_.erase(last);
        return slot;
      }
      total += last->second.nbytes;
      if (total >= nbytes) break;
    }
    for (auto at = blocks_.begin(); at != last; ++at) Take(at->second, slot);
    const Key key = last->first;
    Block rest = std::move(last->second);
    blocks_.erase(blocks_.begin(), std::next(last));
    if (total > nbytes) {
      AddFreer(rest.freed_by, slot);
      Cut(rest.ranges, rest.nbytes - (total - nbytes), slot.ranges);
      rest.nbytes = total - nbytes;
      Add(key, std::move(rest));
    } else {
      Take(rest, slot);
    }
    slot.ranges = Coalesced(std::move(slot.ranges));
    return slot;
  }

 private:
  using Key = std::pair<double, int64_t>;  // the smallest was freed first
  struct Block {
    Ranges ranges;
    int64_t nbytes;
    OpId freed_by;
  };

  static void Take(const Block& block, Slot& slot) {
    slot.ranges.insert(slot.ranges.end(), block.ranges.begin(),
                       block.ranges.end());
    AddFreer(block.freed_by, slot);
  }

  static void AddFreer(OpId freer, Slot& slot) {
    std::vector<OpId>& freers = slot.freers;
    if (freer != kNone &&
        std::find(freers.begin(), freers.end(), freer) == freers.end())
      freers.push_back(freer);
  }

  void Add(const Key& key, Block block) {
    by_size_[block.nbytes].insert(key);
    blocks_[key] = std::move(block);
  }

  std::optional<Key> OldestOfSize(int64_t nbytes) {
    const auto found = by_size_.find(nbytes);
    if (found == by_size_.end()) return std::nullopt;
    std::set<Key>& keys = found->second;
    while (!keys.empty()) {
      const auto block = blocks_.find(*keys.begin());
      if (block != blocks_.end() && block->second.nbytes == nbytes)
        return block->first;
      keys.erase(keys.begin());  // it is gone, or has another size by now
    }
    return std::nullopt;
  }

  int64_t nbytes_;
  int64_t free_bytes_ = 0;
  int64_t count_ = 0;
  std::map<Key, Block> blocks_;
  std::unordered_map<int64_t, std::set<Key>> by_size_;
};

// When each op is expected to be over.
class Clock {
 public:
  Clock(const TaskGraph& graph, const Rates& rates)
      : graph_(graph), rates_(rates) {}

  double end(OpId op) const { return ends_[op]; }

  void Add(const Op& op) {
    double begin = 0.0;
    for (const Dep& dep : op.deps) begin = std::max(begin, ends_[dep.op]);
    if (op.kind != OpKind::kDrop) {
      double& busy = busy_[static_cast<size_t>(op.kind)];
      begin = std::max(begin, busy);
      if (op.kind == OpKind::kRun) {
        begin += graph_.tasks[op.of].seconds;
      } else {
        const double rate =
            op.kind == OpKind::kOffload ? rates_.d2h : rates_.h2d;
        begin += static_cast<double>(graph_.buffers[op.of].nbytes) / rate;
      }
      busy = begin;
    }
    ends_.push_back(begin);
  }

 private:
  const TaskGraph& graph_;
  const Rates rates_;
  std::vector<double> ends_;
  double busy_[3] = {0.0, 0.0, 0.0};  // by OpKind
};

// Bytes in use while each of the tasks runs that are reserved and not executed,
// and after the last of them.
class Ahead {
 public:
  bool any() const { return first_ < end_; }
  int64_t most() const { return most_.front().second + more_; }
  int64_t after() const { return after_ + more_; }

  void Add(int64_t during, int64_t after) {
    const int64_t nbytes = during - more_;
    while (!most_.empty() && most_.back().second <= nbytes) most_.pop_back();
    most_.emplace_back(end_, nbytes);
    after_ = after - more_;
    ++end_;
  }

  void Executed() {
    ++first_;
    if (most_.front().first < first_) most_.pop_front();
  }

  void Come(int64_t nbytes) { more_ += nbytes; }

 private:
  int64_t first_ = 0, end_ = 0;
  std::deque<std::pair<int64_t, int64_t>> most_;
  int64_t more_ = 0, after_ = 0;
};

// The state of the simulation; names and steps are those of planner.py.
class Builder {
 public:
  Builder(const TaskGraph& graph, int64_t arena_bytes, const Strategy& strategy,
          const Rates& rates, bool with_addresses)
      : graph_(graph),
        strategy_(strategy),
        clock_(graph, rates),
        arena_(arena_bytes, with_addresses),
        count_(static_cast<int32_t>(graph.tasks.size())),
        trifle_(arena_bytes / 4096),
        device_(graph.buffers.size(), kNone),
        host_(graph.buffers.size(), kNone),
        reserved_(graph.buffers.size()),
        uses_(graph.buffers.size()),
        last_use_(graph.buffers.size(), -1),
        is_output_(graph.buffers.size(), false) {
    for (TaskId t = count_; t-- > 0;)
      for (BufferId b : graph.tasks[t].inputs) uses_[b].push_back(t);
    for (BufferId b : graph.outputs) is_output_[b] = true;
    for (const auto& [task, moves] : strategy.come)
      for (const Move& move : moves) from_[move.first][move.second] = task;
    PlaceInputs();
  }

  MemGraph Build() {
    int32_t reserved = 0, executed = 0;
    while (executed < count_) {
      if (reserved < count_ && Reserve(reserved, executed)) {
        ++reserved;
      } else if (reserved == executed) {
        MakeRoom(executed);
      } else if (MakeRoomAhead(reserved, executed)) {
        // Then it is reserved.
      } else {
        LetCome(executed);
        Execute(executed);
        ++executed;
      }
    }
    BringOutputs();
    for (BufferId b : graph_.outputs) {
      const bool on_host = graph_.buffers[b].end_on_host || device_[b] == kNone;
      plan_.outputs_at_end.push_back(There(on_host ? host_[b] : device_[b]));
    }
    return std::move(plan_);
  }

 private:
  // Min-heap of (key, buffer): the best victim first.
  using Key = std::tuple<bool, int64_t>;
  using Victim = std::pair<Key, BufferId>;

  // Of outputs that the allocation horizon has passed; without bytes where they
  // get these when their task is emitted.
  struct Reserved {
    bool is = false;
    Slot slot;
  };

  void PlaceInputs() {
    const auto buffers = static_cast<BufferId>(graph_.buffers.size());
    for (BufferId b = 0; b < buffers; ++b) {
      const Start start = graph_.buffers[b].start;
      if (start == Start::kWritten) continue;
      const bool on_host = start == Start::kHost;
      Ranges ranges;
      if (!on_host) ranges = arena_.Take(Size(b)).ranges;
      plan_.inputs_at_start.push_back(
          AddInstance(b, std::move(ranges), on_host));
    }
    for (BufferId b = 0; b < buffers; ++b) {
      if (graph_.buffers[b].start != Start::kDevice) continue;
      if (uses_[b].empty()) {
        DropUsedUp(b);
      } else {
        OfferAsVictim(b);
      }
    }
    LetLeave(-1);
  }

  void BringOutputs() {
    std::vector<BufferId> away;
    int64_t nbytes = 0;
    for (BufferId b : graph_.outputs) {
      if (graph_.buffers[b].end_on_host || device_[b] != kNone) continue;
      away.push_back(b);
      nbytes += Size(b);
    }
    if (nbytes > arena_.free_bytes()) return;
    for (BufferId b : away) Reload(b, count_);
  }

  // The allocation horizon.

  bool Reserve(TaskId position, TaskId executed) {
    if (position > executed && !MayLookAhead(position, executed)) return false;
    if (ShortOf(position, executed) > 0) return false;
    const Task& task = graph_.tasks[position];
    std::vector<BufferId> reloads;
    int64_t arriving = 0;
    for (BufferId b : task.inputs) {
      if (!IsMissing(b)) continue;
      reloads.push_back(b);
      arriving += Size(b);
    }
    if (strategy_.late) {
      const int64_t nbytes = arriving + NewBytes(graph_, task);
      for (BufferId b : task.outputs) reserved_[b].is = true;
      WillBeUsed(position, arriving, nbytes);
    }
    for (BufferId b : reloads) Reload(b, position);
    if (strategy_.late) return true;
    for (size_t o = 0; o < task.outputs.size(); ++o) {
      const BufferId b = task.outputs[o];
      reserved_[b].is = true;
      if (!TakesOver(task, o)) reserved_[b].slot = arena_.Take(Size(b));
    }
    while (!workspaces_.empty() && workspaces_.back().second <= task.workspace)
      workspaces_.pop_back();
    workspaces_.emplace_back(position, task.workspace);
    return true;
  }

  // Bytes that must leave before a task can be reserved, if any.
  int64_t ShortOf(TaskId position, TaskId executed) {
    const Task& task = graph_.tasks[position];
    const int64_t added = NewBytes(graph_, task);
    int64_t nbytes = MissingBytes(task) + added;
    if (position > executed)
      nbytes += static_cast<int64_t>(strategy_.spare *
                                     static_cast<double>(arena_.nbytes()));
    if (!strategy_.late)
      return nbytes + WorkspaceAfter(position, executed) - arena_.free_bytes();
    int64_t most = UsedBefore() + nbytes + task.workspace;
    if (ahead_.any())  // what is reloaded is there while these run
      most = std::max(most, nbytes - added + ahead_.most());
    return most - arena_.nbytes();
  }

  int64_t UsedBefore() const {
    if (ahead_.any()) return ahead_.after();
    return arena_.nbytes() - arena_.free_bytes();
  }

  void WillBeUsed(TaskId position, int64_t arriving, int64_t nbytes) {
    const Task& task = graph_.tasks[position];
    const int64_t used = UsedBefore() + nbytes;
    ahead_.Come(arriving);
    int64_t freed = 0;
    const auto frees = [&](BufferId b) {
      const Buffer& buffer = graph_.buffers[b];
      const bool wanted = is_output_[b] && !buffer.end_on_host;
      if (!buffer.pinned && !wanted) freed += Size(b);
    };
    for (size_t i = 0; i < task.inputs.size(); ++i) {
      const BufferId b = task.inputs[i];
      if (uses_[b].front() == position && !IsOverwritten(task, i)) frees(b);
    }
    for (BufferId b : task.outputs)
      if (uses_[b].empty()) frees(b);
    ahead_.Add(used + task.workspace, used - freed);
  }

  bool MayLookAhead(TaskId position, TaskId executed) const {
    if (strategy_.window) {
      const Window& window = *strategy_.window;
      const int32_t begin =
          window.partitions[executed] / window.returned * window.returned;
      return window.partitions[position] < begin + window.resident;
    }
    if (from_.empty()) return true;
    for (BufferId b : graph_.tasks[position].inputs) {
      const auto moves = from_.find(b);
      if (moves == from_.end()) continue;
      const auto move = moves->second.find(position);
      if (move != moves->second.end() && move->second > executed) return false;
    }
    return true;
  }

  bool IsMissing(BufferId b) const {
    return device_[b] == kNone && !reserved_[b].is;
  }

  // Of inputs to reload.
  int64_t MissingBytes(const Task& task) const {
    int64_t nbytes = 0;
    for (BufferId b : task.inputs)
      if (IsMissing(b)) nbytes += Size(b);
    return nbytes;
  }

  int64_t WorkspaceAfter(TaskId position, TaskId executed) {
    while (!workspaces_.empty() && workspaces_.front().first < executed)
      workspaces_.pop_front();
    const int64_t largest =
        workspaces_.empty() ? 0 : workspaces_.front().second;
    return std::max(largest, graph_.tasks[position].workspace);
  }

  void MakeRoom(TaskId position) {
    const Task& task = graph_.tasks[position];
    const int64_t nbytes =
        MissingBytes(task) + NewBytes(graph_, task) + task.workspace;
    std::vector<Victim> kept;
    while (arena_.free_bytes() < nbytes) {
      const Victim victim = PopVictim();
      if (IsStale(victim)) continue;
      if (Reads(position, victim.second)) {
        kept.push_back(victim);
      } else {
        Evict(victim.second, position);
      }
    }
    for (const Victim& victim : kept) victims_.push(victim);
  }

  bool MakeRoomAhead(TaskId position, TaskId executed) {
    if (position >= std::min(count_, executed + 1 + strategy_.ahead))
      return false;
    if (!MayLookAhead(position, executed)) return false;
    std::unordered_set<BufferId> keep;
    for (TaskId t = executed; t <= position; ++t)
      keep.insert(graph_.tasks[t].inputs.begin(), graph_.tasks[t].inputs.end());
    const int64_t missing = ShortOf(position, executed);
    std::vector<Victim> popped;
    std::vector<BufferId> chosen;
    int64_t freed = 0;
    while (freed < missing && !victims_.empty() && popped.size() < kFew) {
      const Victim victim = PopVictim();
      if (IsStale(victim)) continue;
      popped.push_back(victim);
      const BufferId b = victim.second;
      const bool is_new =
          std::find(chosen.begin(), chosen.end(), b) == chosen.end();
      if (host_[b] != kNone && keep.count(b) == 0 && is_new) {
        chosen.push_back(b);
        freed += Size(b);
      }
    }
    for (const Victim& victim : popped) victims_.push(victim);
    if (freed < missing) return false;
    for (BufferId b : chosen) Evict(b, position);
    ahead_.Come(-freed);
    return true;
  }

  void LetCome(TaskId executed) {
    const auto moves = strategy_.come.find(executed);
    if (moves != strategy_.come.end())
      coming_.insert(coming_.end(), moves->second.begin(), moves->second.end());
    while (!coming_.empty()) {
      const auto [b, reader] = coming_.front();
      const bool is_next = !uses_[b].empty() && uses_[b].back() == reader;
      if (device_[b] == kNone && is_next) {
        if (ahead_.most() + Size(b) > arena_.nbytes())
          return;  // later, perhaps
        ahead_.Come(Size(b));
        Reload(b, reader);
      }
      coming_.pop_front();
    }
  }

  // The execution horizon.

  void Execute(TaskId position) {
    const Task& task = graph_.tasks[position];
    Op op{OpKind::kRun, position, {}, {}, {}, {}};
    for (BufferId b : task.inputs) {
      op.reads.push_back(There(device_[b]));
      WaitFor(op, writers_[op.reads.back()]);
    }
    if (strategy_.late) ahead_.Executed();
    for (size_t o = 0; o < task.outputs.size(); ++o) {
      const BufferId b = task.outputs[o];
      Slot slot = std::move(reserved_[b].slot);
      reserved_[b] = Reserved();
      if (const std::optional<int32_t> over = TakesOver(task, o)) {
        slot = GivenUp(task.inputs[*over]);
      } else if (strategy_.late) {
        slot = arena_.Take(Size(b));
      }
      WaitForAll(op, slot.freers, Why::kWrites, b);
      op.writes.push_back(AddInstance(b, std::move(slot.ranges), false));
    }
    Slot workspace = arena_.Take(task.workspace);
    WaitForAll(op, workspace.freers, Why::kWorkspace);
    op.workspace = workspace.ranges;
    if (strategy_.serial && !runs_.empty())
      op.deps.push_back({runs_.back(), Why::kSerial, kNone});
    const OpId run = Emit(std::move(op));
    runs_.push_back(run);
    arena_.Free(std::move(workspace.ranges), task.workspace, run,
                clock_.end(run));
    for (size_t i = 0; i < task.inputs.size(); ++i) {
      const BufferId b = task.inputs[i];
      uses_[b].pop_back();
      if (!IsOverwritten(task, i)) AfterUse(b, position);
    }
    for (BufferId b : task.outputs) {
      if (graph_.buffers[b].end_on_host) Offload(b, position);
      AfterUse(b, position);
    }
    LetLeave(position);
  }

  void LetLeave(TaskId position) {
    const auto leaving = strategy_.leave.find(position);
    if (leaving == strategy_.leave.end()) return;
    for (BufferId b : leaving->second) {
      if (device_[b] == kNone) continue;
      Evict(b, position);
      ahead_.Come(-Size(b));
    }
  }

  void AfterUse(BufferId b, TaskId position) {
    last_use_[b] = position;
    if (uses_[b].empty() && (!is_output_[b] || graph_.buffers[b].end_on_host)) {
      DropUsedUp(b);
    } else {
      OfferAsVictim(b);
    }
  }

  // The slot of what is written over, and the ops that must be over before.
  Slot GivenUp(BufferId b) {
    const InstanceId instance = There(std::exchange(device_[b], kNone));
    return {plan_.instances[instance].ranges,
            std::exchange(readers_[instance], {})};
  }

  void DropUsedUp(BufferId b) {
    if (!graph_.buffers[b].pinned) Drop(b, Why::kUsedUp);
  }

  // Moving buffers.

  void Evict(BufferId b, TaskId position) {
    if (host_[b] == kNone) Offload(b, position);
    Drop(b, Why::kLeaves);
  }

  void Offload(BufferId b, TaskId position) {
    const InstanceId source = There(device_[b]);
    Op op{OpKind::kOffload, b, {source}, {AddInstance(b, {}, true)}, {}, {}};
    WaitFor(op, writers_[source]);
    WaitForPartition(op, position);
    Emit(std::move(op));
  }

  void Reload(BufferId b, TaskId position) {
    const InstanceId source = There(host_[b]);
    Op op{OpKind::kReload, b, {source}, {}, {}, {}};
    WaitFor(op, writers_[source]);
    Slot slot = arena_.Take(Size(b));
    WaitForAll(op, slot.freers, Why::kReloads, b);
    WaitForPartition(op, position);
    op.writes.push_back(AddInstance(b, std::move(slot.ranges), false));
    Emit(std::move(op));
    OfferAsVictim(b);
  }

  void Drop(BufferId b, Why why) {
    const InstanceId instance = There(std::exchange(device_[b], kNone));
    Op op{OpKind::kDrop, b, {instance}, {}, {}, {}};
    WaitForAll(op, readers_[instance], why);
    if (op.deps.empty() && writers_[instance] != kNone)
      op.deps.push_back({writers_[instance], why, kNone});
    readers_[instance].clear();
    const OpId drop = Emit(std::move(op));
    arena_.Free(plan_.instances[instance].ranges, Size(b), drop,
                clock_.end(drop));
  }

  static void WaitFor(Op& op, OpId other) {
    if (other != kNone) op.deps.push_back({other, Why::kData, kNone});
  }

  static void WaitForAll(Op& op, const std::vector<OpId>& others, Why why,
                         BufferId b = kNone) {
    for (OpId other : others) op.deps.push_back({other, why, b});
  }

  // What a window makes a transfer for a task wait for.
  void WaitForPartition(Op& op, TaskId position) const {
    if (!strategy_.window || runs_.empty()) return;
    const auto runs = static_cast<int32_t>(runs_.size());
    int32_t last = runs - 1;
    if (position < count_) {
      const Window& window = *strategy_.window;
      const int32_t beyond = window.partitions[position] + 1 - window.resident;
      // Rounded up; below the first partition it is that one anyway.
      const int32_t begin =
          (beyond + window.returned - 1) / window.returned * window.returned;
      last = window.firsts[std::max(0, beyond > 0 ? begin : 0)] - 1;
    }
    if (last >= 0 && last < runs)
      op.deps.push_back({runs_[last], Why::kPartition, kNone});
  }

  // Records.

  OpId Emit(Op op) {
    // One for each op, the first.
    std::stable_sort(op.deps.begin(), op.deps.end(),
                     [](const Dep& a, const Dep& b) { return a.op < b.op; });
    const auto same = [](const Dep& a, const Dep& b) { return a.op == b.op; };
    op.deps.erase(std::unique(op.deps.begin(), op.deps.end(), same),
                  op.deps.end());
    clock_.Add(op);
    const auto id = static_cast<OpId>(plan_.ops.size());
    if (op.kind != OpKind::kDrop)
      for (InstanceId i : op.reads)
        if (!plan_.instances[i].on_host) readers_[i].push_back(id);
    for (InstanceId i : op.writes) writers_[i] = id;
    plan_.ops.push_back(std::move(op));
    return id;
  }

  InstanceId AddInstance(BufferId b, Ranges ranges, bool on_host) {
    const auto id = static_cast<InstanceId>(plan_.instances.size());
    plan_.instances.push_back({b, std::move(ranges), on_host});
    writers_.push_back(kNone);
    readers_.emplace_back();
    (on_host ? host_ : device_)[b] = id;
    return id;
  }

  // Never read where nothing is: a graph may be wrong.
  static InstanceId There(InstanceId instance) {
    if (instance == kNone) throw std::runtime_error("read where it is not");
    return instance;
  }

  int64_t Size(BufferId b) const { return graph_.buffers[b].device_bytes; }

  // The position of the input whose bytes an output takes over.
  static std::optional<int32_t> TakesOver(const Task& task, size_t output) {
    for (const auto& [o, i] : task.overwrites)
      if (static_cast<size_t>(o) == output) return i;
    return std::nullopt;
  }

  bool Reads(TaskId position, BufferId b) const {
    const std::vector<BufferId>& inputs = graph_.tasks[position].inputs;
    return std::find(inputs.begin(), inputs.end(), b) != inputs.end();
  }

  Victim PopVictim() {
    if (victims_.empty()) throw std::runtime_error("nothing is left to evict");
    const Victim victim = victims_.top();
    victims_.pop();
    return victim;
  }

  void OfferAsVictim(BufferId b) {
    if (!graph_.buffers[b].pinned) victims_.push({VictimKey(b), b});
  }

  bool IsStale(const Victim& victim) const {
    const BufferId b = victim.second;
    return device_[b] == kNone || victim.first != VictimKey(b);
  }

  Key VictimKey(BufferId b) const {
    const bool is_trifle = Size(b) < trifle_;
    if (!strategy_.belady) return {is_trifle, last_use_[b]};
    return {is_trifle, -(uses_[b].empty() ? kNever : uses_[b].back())};
  }

  const TaskGraph& graph_;
  const Strategy& strategy_;
  Clock clock_;
  Arena arena_;
  const int32_t count_;
  const int64_t trifle_;
  MemGraph plan_;
  // The present instances of each buffer.
  std::vector<InstanceId> device_;
  std::vector<InstanceId> host_;
  // Of each instance: the op that wrote it, and those that read it.
  std::vector<OpId> writers_;
  std::vector<std::vector<OpId>> readers_;
  std::vector<Reserved> reserved_;
  std::vector<std::vector<TaskId>> uses_;  // the next one last
  std::vector<TaskId> last_use_;
  std::vector<bool> is_output_;
  std::deque<std::pair<TaskId, int64_t>> workspaces_;
  Ahead ahead_;
  std::priority_queue<Victim, std::vector<Victim>, std::greater<Victim>>
      victims_;
  // Of buffers that come for a task: from which task on.
  std::unordered_map<BufferId, std::unordered_map<TaskId, TaskId>> from_;
  std::deque<Move> coming_;
  std::vector<OpId> runs_;
};

}  // namespace

MemGraph MakePlan(const TaskGraph& graph, int64_t arena_bytes,
                  const Strategy& strategy, const Rates& rates,
                  bool with_addresses) {
  return Builder(graph, arena_bytes, strategy, rates, with_addresses).Build();
}

}  // namespace jturnip
