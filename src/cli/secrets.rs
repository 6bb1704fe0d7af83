//! `springtide secrets`: the keys that the roles of a deployment hold, a folder for each role.
//! `springtide migrate --secrets` makes them known to the database.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use artifact::sign::{Role as SigningRole, SigningKey};
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Role, Scope, Scopes};
use edge::sampler::{self, SamplerKey};
use sqlx::PgPool;

use super::audit::CommandLine;
use crate::config::Config;
use crate::private;

/// The file of a folder's API key.
const API_KEY: &str = "api-key";
/// The extension of a replica's private sampler key; the name before it is the replica's.
const SAMPLER: &str = "sampler-key";
/// (folder, key, role of the key): which signing key is where.
const SIGNING_KEYS: [(&str, &str, SigningRole); 3] = [
    ("root", "root", SigningRole::Root),
    ("control", "release", SigningRole::Release),
    ("train", "trainer", SigningRole::Trainer),
];
/// Who verifies signatures.
const VERIFIERS: [&str; 4] = ["control", "train", "serve", "follow"];

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Folder to write. What is there stays, so it can be run again.
    dir: PathBuf,
    /// Names of the replicas (serve.replica), separated by commas. Each gets a sampler key.
    #[arg(long, value_delimiter = ',', default_value = "serve-0")]
    replicas: Vec<String>,
}

impl Args {
    pub fn run(self) -> anyhow::Result<()> {
        for replica in &self.replicas {
            ensure!(
                !replica.is_empty() && !replica.contains(['/', ' ']),
                "--replicas: {replica:?}: give names without spaces or slashes"
            );
        }
        for folder in FOLDERS {
            let path = self.dir.join(folder);
            if !path.exists() {
                private::folder(&path, 0o700).with_context(|| format!("create {}", path.display()))?;
            }
        }
        self.signing_keys()?;
        for (folder, _) in api_keys() {
            write_once(&self.dir.join(folder).join(API_KEY), key::new_secret)?;
        }
        write_once(&self.dir.join("follow/caller-key"), private::secret)?;
        for replica in &self.replicas {
            SamplerKey::load_or_create(&self.dir.join("serve").join(format!("{replica}.{SAMPLER}")))?;
        }
        println!("{}: a folder for each role, {}", self.dir.display(), FOLDERS.join(", "));
        println!(
            "next: move {}/root to a safe place, then `springtide migrate --secrets {}`",
            self.dir.display(),
            self.dir.display()
        );
        Ok(())
    }

    /// Makes each key once, also if its private part was moved away, and copies the public parts to
    /// those who verify.
    fn signing_keys(&self) -> anyhow::Result<()> {
        for (folder, name, role) in SIGNING_KEYS {
            let copies = VERIFIERS.map(|verifier| self.dir.join(verifier).join(format!("{name}.pub")));
            if copies.iter().all(|copy| copy.exists()) {
                continue;
            }
            let own = self.dir.join(folder);
            SigningKey::create(&own, name, role).with_context(|| format!("make the key {name}"))?;
            let public = own.join(format!("{name}.pub"));
            for copy in copies.iter().filter(|copy| **copy != public) {
                fs::copy(&public, copy).with_context(|| format!("write {}", copy.display()))?;
            }
        }
        Ok(())
    }
}

/// All folders of a deployment's secrets. `app` is for a back end, `admin` for a person.
const FOLDERS: [&str; 8] = [
    "root",
    "control",
    "train",
    "serve",
    "follow",
    "app",
    "prometheus",
    "admin",
];

/// (folder, what its API key may do)
fn api_keys() -> [(&'static str, Grant); 6] {
    let scope = |scope| Grant::Scopes(Scopes::of(&[scope]));
    [
        ("train", scope(Scope::Completions)),
        ("serve", scope(Scope::Replica)),
        ("follow", scope(Scope::Replica)),
        ("app", Grant::Role(Role::Serving)),
        ("prometheus", scope(Scope::Read)),
        ("admin", scope(Scope::Admin)),
    ]
}

/// Writes a file for this user alone, unless it exists.
fn write_once(path: &Path, text: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let text = text()?;
    let write = || private::create(path)?.write_all(text.as_bytes());
    write().with_context(|| format!("write {}", path.display()))
}

/// Makes the API keys and samplers of `dir` known to the database. A folder that is missing is left
/// out; what is known already stays as it is, also if it is revoked.
pub async fn register(dir: &Path, config: &Config, pool: &PgPool) -> anyhow::Result<()> {
    ensure!(dir.is_dir(), "--secrets {}: there is no such folder", dir.display());
    let person = CommandLine::new();
    let mut known: Vec<String> = Vec::new();
    for (folder, grant) in api_keys() {
        let path = dir.join(folder).join(API_KEY);
        if !path.exists() {
            continue;
        }
        let secret = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let new = NewKey {
            tenant: &config.policy.tenant,
            grant,
            label: folder,
            expires_at: None,
            replica: None,
            requests_per_second: None,
        };
        key::register(
            pool,
            secret.trim(),
            &new,
            person.actor(),
            "springtide migrate --secrets",
        )
        .await
        .with_context(|| format!("register {}", path.display()))?;
        known.push(format!("the API key of {folder}"));
    }
    let serve = dir.join("serve");
    let samplers = serve.is_dir().then(|| fs::read_dir(&serve)).transpose();
    let samplers = samplers.with_context(|| format!("list {}", serve.display()))?;
    for entry in samplers.into_iter().flatten() {
        let path = entry.with_context(|| format!("list {}", serve.display()))?.path();
        let (Some(name), Some(SAMPLER)) = (
            path.file_stem().and_then(|name| name.to_str()),
            path.extension().and_then(|extension| extension.to_str()),
        ) else {
            continue;
        };
        register_sampler(pool, config, &SamplerKey::load(&path)?, name)
            .await
            .with_context(|| format!("register {}", path.display()))?;
        known.push(format!("the sampler {name}"));
    }
    println!("the schema is there, and known are: {}", known.join(", "));
    Ok(())
}

/// Makes a replica's key known. A revoked key stays revoked.
pub async fn register_sampler(pool: &PgPool, config: &Config, key: &SamplerKey, replica: &str) -> anyhow::Result<()> {
    if sampler::find(pool, key.id()).await?.is_none() {
        let (policy, person) = (Some(&*config.policy.name), CommandLine::new());
        sampler::register(pool, &key.public_key(), replica, policy, None, person.actor()).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn files(dir: &Path) -> BTreeMap<PathBuf, String> {
        let folders = FOLDERS.into_iter().map(|folder| dir.join(folder));
        let entries = folders.flat_map(|folder| fs::read_dir(folder).unwrap());
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .map(|path| (path.clone(), fs::read_to_string(&path).unwrap()))
            .collect()
    }

    fn write(dir: &Path, replicas: &[&str]) {
        let args = Args {
            dir: dir.to_owned(),
            replicas: replicas.iter().map(|&name| name.to_owned()).collect(),
        };
        args.run().unwrap();
    }

    #[test]
    fn each_role_gets_what_it_needs_and_a_second_run_only_adds() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &["serve-0"]);
        let first = files(dir.path());
        let has = |path: &str| first.contains_key(&dir.path().join(path));
        for path in [
            "root/root.key",
            "control/release.key",
            "train/trainer.key",
            "serve/serve-0.sampler-key",
        ] {
            assert!(has(path), "{path}");
        }
        for verifier in VERIFIERS {
            for key in ["root", "release", "trainer"] {
                assert!(has(&format!("{verifier}/{key}.pub")), "{verifier} has no {key}.pub");
            }
        }
        // Private keys are with their role alone.
        let private = first
            .keys()
            .filter(|path| path.extension().is_some_and(|extension| extension == "key"));
        assert_eq!(private.count(), 3);
        fs::remove_dir_all(dir.path().join("root")).unwrap();
        write(dir.path(), &["serve-0", "serve-1"]);
        let mut second = files(dir.path());
        assert!(second.remove(&dir.path().join("serve/serve-1.sampler-key")).is_some());
        let kept: BTreeMap<_, _> = first
            .into_iter()
            .filter(|(path, _)| !path.starts_with(dir.path().join("root")))
            .collect();
        assert_eq!(second, kept);
    }
}
