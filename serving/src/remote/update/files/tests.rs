use super::*;
use std::os::unix::fs::symlink;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn refused(patch_dir: &Path) -> String {
    format!("{:#}", Files::open(patch_dir).err().unwrap())
}

fn checkpoint() -> Checkpoint {
    Checkpoint {
        tensors: std::collections::BTreeMap::new(),
        files: std::collections::BTreeMap::from([("config.json".to_owned(), "{}".into())]),
    }
}

#[test]
fn a_folder_that_others_may_have_made_or_may_change_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("own");
    drop(Files::open(&own).unwrap());
    assert_eq!(mode(&own), 0o750);
    for (open_to, refuses) in [
        (0o770, true),
        (0o757, true),
        (0o1777, true),
        (0o755, false),
        (0o700, false),
    ] {
        fs::set_permissions(&own, Permissions::from_mode(open_to)).unwrap();
        match refuses {
            true => assert!(refused(&own).contains("chmod go-w"), "{open_to:o}"),
            false => drop(Files::open(&own).unwrap()),
        }
        // it stays as somebody chose it
        assert_eq!(mode(&own), open_to);
    }
    let link = dir.path().join("link");
    symlink(&own, &link).unwrap();
    assert!(refused(&link).contains("is a link or a file"), "{}", refused(&link));
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(refused(&dir.path().join("file")).contains("is a link or a file"));
    assert!(refused(Path::new("weights")).contains("give an absolute path"));
    // the root folder's owner, if this is not root, and otherwise a folder that is given away
    let others = match Uid::effective().is_root() {
        false => PathBuf::from("/"),
        true => {
            std::os::unix::fs::chown(&own, Some(65_534), None).unwrap();
            own
        }
    };
    assert!(refused(&others).contains("belongs to the user"), "{}", refused(&others));
}

#[test]
fn the_group_may_read_weights_and_nobody_else_and_no_link_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::open(&dir.path().join("patches")).unwrap();
    assert_eq!(mode(&files.dir), 0o750);
    let weights = files.weights_of(0);
    let elsewhere = dir.path().join("elsewhere");
    symlink(&elsewhere, &weights.folder).unwrap();
    assert!(weights.write_folder(&checkpoint()).is_err() && !elsewhere.exists());
    fs::remove_file(&weights.folder).unwrap();
    weights.write_folder(&checkpoint()).unwrap();
    assert_eq!(mode(&weights.folder), 0o750);
    assert_eq!(mode(&weights.folder.join("config.json")), 0o640);
    let folder = weights.folder.clone();
    drop(weights);
    assert!(!folder.exists());
}

#[test]
fn what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let patches = dir.path().join("patches");
    let living = Files::open(&patches).unwrap();
    let of_living = living.weights_of(0);
    of_living.write_folder(&checkpoint()).unwrap();
    // a second one with the same process id, as in another container
    let beside = Files::open(&patches).unwrap();
    assert_ne!(beside.dir, living.dir);
    assert!(of_living.folder.exists());
    // as a process that was killed leaves it: a lock that nobody holds
    let left = patches.join(format!("{PREFIX}left"));
    fs::create_dir(&left).unwrap();
    fs::write(left.join(LOCK), "").unwrap();
    fs::write(left.join("0.safetensors"), "weights").unwrap();
    // a link to such a folder is not followed
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join(LOCK), "").unwrap();
    symlink(&elsewhere, patches.join(format!("{PREFIX}link"))).unwrap();
    fs::create_dir(patches.join("mine")).unwrap();
    fs::create_dir(patches.join("weights-mine")).unwrap();
    let next = Files::open(&patches).unwrap();
    assert!(!left.exists());
    assert!(of_living.folder.join("config.json").exists());
    assert!(patches.join("mine").exists() && patches.join("weights-mine").exists());
    drop(of_living);
    drop((living, beside, next));
    assert!(elsewhere.join(LOCK).exists());
    assert_eq!(fs::read_dir(&patches).unwrap().count(), 3);
}
