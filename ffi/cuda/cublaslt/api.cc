#include "cuda/cublaslt/api.h"

#include <dlfcn.h>
#include <link.h>

#include <map>
#include <mutex>

namespace jaxfp8::cuda {
namespace {

constexpr char kLibrary[] = "libcublasLt.so.13";
constexpr char kLibraryBefore[] = "libcublasLt.so.12";
constexpr int kVersionNeeded = 130000;

// Never destroyed: handles, and kernels still running at exit, use the library.
struct Library {
  std::mutex mutex;
  std::string given_path;
  CublasLt api{};
  bool open = false;
  std::map<int, cublasLtHandle_t> handles;
};

Library& TheLibrary() {
  static Library* library = new Library;
  return *library;
}

std::string LoaderError() {
  const char* text = dlerror();
  return text ? text : "unknown error";
}

Status Open(const std::string& given_path, void*& library) {
  std::string reason;
  if ((library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD))) return {};
  if (!given_path.empty()) {
    if ((library = dlopen(given_path.c_str(), RTLD_NOW | RTLD_LOCAL))) return {};
    reason = LoaderError();
  }
  if ((library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL))) return {};
  if (reason.empty()) reason = LoaderError();
  const bool older = dlopen(kLibraryBefore, RTLD_NOW | RTLD_NOLOAD);
  return std::string(kLibrary) + " cannot be loaded (" + reason +
         "); install it with `pip install \"jax[cuda13]\"`" +
         (older ? ": this process runs on CUDA 12, and the kernels need CUDA 13" : "");
}

// Returns the name of a missing function, or "".
std::string Fill(void* library, CublasLt& api) {
#define JAXFP8_LOAD(name, symbol)                                          \
  api.name = reinterpret_cast<decltype(&symbol)>(dlsym(library, #symbol)); \
  if (!api.name) return #symbol;
  JAXFP8_CUBLASLT(JAXFP8_LOAD)
#undef JAXFP8_LOAD
  return "";
}

// The file a library was loaded from.
std::string FileOf(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || !map) return kLibrary;
  return map->l_name;
}

Status Load(Library& library) {
  void* opened = nullptr;
  JAXFP8_RETURN_IF_ERROR(Open(library.given_path, opened));
  library.api.path = FileOf(opened);
  const std::string missing = Fill(opened, library.api);
  if (!missing.empty()) return library.api.path + " has no function `" + missing + "`";
  library.api.version = static_cast<int>(library.api.GetVersion());
  if (library.api.version < kVersionNeeded) {
    return library.api.path + " is cuBLASLt " + std::to_string(library.api.version) +
           ", but the kernels need " + std::to_string(kVersionNeeded) +
           " or later; install it with `pip install \"jax[cuda13]\"`";
  }
  library.open = true;
  return {};
}

}  // namespace

Status OpenCublasLt(const CublasLt*& api) {
  Library& library = TheLibrary();
  const std::lock_guard lock(library.mutex);
  if (!library.open) JAXFP8_RETURN_IF_ERROR(Load(library));
  api = &library.api;
  return {};
}

void SetCublasLtPath(const std::string& path) {
  Library& library = TheLibrary();
  const std::lock_guard lock(library.mutex);
  library.given_path = path;
}

Status CublasLtHandle(int ordinal, cublasLtHandle_t& handle) {
  const CublasLt* api = nullptr;
  JAXFP8_RETURN_IF_ERROR(OpenCublasLt(api));
  Library& library = TheLibrary();
  const std::lock_guard lock(library.mutex);
  cublasLtHandle_t& kept = library.handles[ordinal];
  if (!kept) JAXFP8_RETURN_IF_ERROR(CublasLtError(api->Create(&kept), "cublasLtCreate"));
  handle = kept;
  return {};
}

Status CublasLtError(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  const CublasLt& api = TheLibrary().api;
  const std::string name = api.GetStatusName ? api.GetStatusName(status) : std::to_string(status);
  return "`" + std::string(what) + "` failed: " + name;
}

}  // namespace jaxfp8::cuda
