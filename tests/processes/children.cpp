#include "processes/children.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

extern char** environ;

namespace fsdp::testing {
namespace {

bool is_launchers(const std::string& name) {
  if (name == "RANK" || name == "WORLD_SIZE") return true;
  for (const char* prefix :
       {"LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "MPI_", "SLURM_", "FSDP_", "GLOO_", "GROUP_"})
    if (name.starts_with(prefix)) return true;
  return false;
}

std::vector<std::string> environment(const std::string& scenario, const Variables& variables) {
  Variables all;
  for (char** e = environ; *e; ++e) {
    const std::string entry = *e;
    const auto name = entry.substr(0, entry.find('='));
    if (!is_launchers(name)) all[name] = entry.substr(std::min(entry.size(), name.size() + 1));
  }
  all.erase("OMP_NUM_THREADS");
  all.emplace("OMP_NUM_THREADS", "1");
  all["FSDP_TEST_SCENARIO"] = scenario;
  for (const auto& [name, value] : variables) all[name] = value;
  std::vector<std::string> result;
  for (const auto& [name, value] : all) result.push_back(std::string(name).append("=").append(value));
  return result;
}

std::string read(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& t : texts) result.push_back(t.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Child::Child(const std::string& scenario, const Variables& variables, std::vector<std::string> command)
    : file_(fresh_path()) {
  if (command.empty()) command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  auto env = environment(scenario, variables);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, file_.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  // A group of its own: torchrun and mpirun start more processes, which end with it.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  const int error =
      posix_spawn(&pid_, command[0].c_str(), &actions, &attributes, pointers(command).data(), pointers(env).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + command[0] + ": " + std::strerror(error));
}

Child::~Child() {
  kill();
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  std::filesystem::remove(file_);
}

void Child::kill() {
  if (pid_ > 0) ::kill(-pid_, SIGKILL);
}

Outcome Child::wait(std::chrono::milliseconds limit) {
  Outcome outcome;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      outcome.hung = true;
      kill();
      ::waitpid(pid_, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  pid_ = -1;
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  outcome.output = read(file_);
  return outcome;
}

bool Child::wait_for_output(const std::string& text) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (read(file_).find(text) == std::string::npos) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(fd);
  if (!bound) throw std::runtime_error("no free port on the loopback");
  return ntohs(address.sin_port);
}

std::string fresh_path() {
  static std::atomic<int> count = 0;
  std::ostringstream name;
  name << "fsdp-test-" << ::getpid() << '-' << count++;
  return (std::filesystem::temp_directory_path() / name.str()).string();
}

Variables torchrun_variables(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", std::to_string(port)}};
}

std::vector<Outcome> run_ranks(const std::string& scenario, int size, const Variables& variables) {
  const int port = free_port();
  std::vector<std::unique_ptr<Child>> children;
  for (int r = 0; r < size; ++r) {
    auto all = torchrun_variables(r, size, port);
    for (const auto& [name, value] : variables) all[name] = value;
    children.push_back(std::make_unique<Child>(scenario, all));
  }
  std::vector<Outcome> outcomes;
  for (auto& child : children) outcomes.push_back(child->wait());
  return outcomes;
}

}  // namespace fsdp::testing
