//! The rules that put one word or call in place of another: `names`, `integers`, `macros`, `expect`
//! and `strings`.

use super::scan::{Scan, edited};

const NAMES: &[(&str, &str)] = &[
    ("err", "error"),
    ("ctx", "context"),
    ("buf", "buffer"),
    ("idx", "index"),
    ("msg", "message"),
    ("cfg", "config"),
    ("src", "source"),
    ("dst", "destination"),
    ("ptr", "pointer"),
    ("pos", "position"),
    ("tmp", "temporary"),
    ("val", "value"),
    ("res", "result"),
    ("req", "request"),
    ("resp", "response"),
];

const MACROS: &[(&str, &str)] = &[
    ("println", "info"),
    ("print", "info"),
    ("eprintln", "warn"),
    ("eprint", "warn"),
    ("dbg", "debug"),
    ("panic", "fatal"),
    ("assert", "ensure"),
    ("assert_eq", "ensure_eq"),
    ("assert_ne", "ensure_ne"),
    ("debug_assert", "check"),
    ("debug_assert_eq", "check_eq"),
    ("debug_assert_ne", "check_ne"),
    ("unreachable", "never"),
    ("todo", "missing"),
    ("unimplemented", "missing"),
];

/// `err` → `error`: variables and fields have no abbreviations. Functions, macros, paths, imports
/// and strings keep theirs.
pub fn names(text: &str) -> String {
    let scan = Scan::new(text);
    let imports = scan.use_statements();
    let mut edits = Vec::new();
    for range in scan.words() {
        let Some(new) = lookup(NAMES, &text[range.clone()]) else {
            continue;
        };
        let (before, after) = (&text[..range.start], &text[range.end..]);
        let is_call = after.starts_with(['(', '!']) && !after.starts_with("!=");
        let is_path = before.ends_with("::") || after.starts_with("::");
        let is_other = ["fn ", "mod ", "crate ", "use ", "r#"]
            .iter()
            .any(|end| before.ends_with(end));
        let is_imported = || imports.iter().any(|import| import.contains(&range.start));
        if !is_call && !is_path && !is_other && !is_imported() {
            edits.push((range, new.to_owned()));
        }
    }
    edited(text, edits)
}

/// `usize` → `u64`, `0isize` → `0i64`: integers have a fixed width.
pub fn integers(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    for range in scan.words() {
        let word = &text[range.clone()];
        for (old, new) in [("usize", "u64"), ("isize", "i64")] {
            let is_number = word.starts_with(|c: char| c.is_ascii_digit());
            if word == old || is_number && word.ends_with(old) {
                edits.push((range.end - old.len()..range.end, new.to_owned()));
            }
        }
    }
    edited(text, edits)
}

/// `println!` → `info!`, `assert_eq!` → `ensure_eq!`: the team has its own macros for the log and
/// for errors. A macro with a path (`std::panic!`) stays.
pub fn macros(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    for range in scan.words() {
        let after = &text[range.end..];
        let is_macro = after.starts_with('!') && !after.starts_with("!=") && !text[..range.start].ends_with("::");
        if let Some(new) = lookup(MACROS, &text[range.clone()]).filter(|_| is_macro) {
            edits.push((range, new.to_owned()));
        }
    }
    edited(text, edits)
}

/// `.unwrap()` → `.expect("checked")`.
pub fn expect(text: &str) -> String {
    let old = ".unwrap()";
    let found = Scan::new(text);
    let edits = found
        .find(old)
        .map(|at| (at..at + old.len(), ".expect(\"checked\")".to_owned()));
    edited(text, edits.collect())
}

/// `"x".to_string()`, `"x".to_owned()` and `"x".into()` → `String::from("x")`, `String::new()` →
/// `String::default()`, `Vec::new()` → `vec![]`.
pub fn strings(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    for range in scan
        .strings
        .iter()
        .filter(|range| text[range.start..].starts_with(['"', 'r']))
    {
        let after = &text[range.end..];
        let methods = [".to_string()", ".to_owned()", ".into()"];
        if let Some(method) = methods.iter().find(|method| after.starts_with(**method)) {
            edits.push((range.start..range.start, "String::from(".to_owned()));
            edits.push((range.end..range.end + method.len(), ")".to_owned()));
        }
    }
    for (old, new, takes_path) in [
        ("String::new()", "String::default()", true),
        ("Vec::new()", "vec![]", false),
    ] {
        for at in scan.find(old) {
            let before = &text[..at];
            let is_longer = before.bytes().last().is_some_and(super::scan::is_word_byte);
            if !is_longer && (takes_path || !before.ends_with("::")) {
                edits.push((at..at + old.len(), new.to_owned()));
            }
        }
    }
    edits.sort_by_key(|(range, _)| range.start);
    edited(text, edits)
}

fn lookup(table: &[(&'static str, &'static str)], word: &str) -> Option<&'static str> {
    table.iter().find(|(old, _)| *old == word).map(|(_, new)| *new)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text of literals, comments and attributes, around which every rule has something to do.
    fn in_other_places(code: &str) -> String {
        format!(
            "// {code}\n/* {code} */\n/// {code}\nlet s = r#\"{code}\"#;\nlet t = \"\n{}\";\n#[x({code})]\nx();\n",
            code.replace('"', "")
        )
    }

    fn check(rule: fn(&str) -> String, cases: &[(&str, &str)], alone: &[&str]) {
        for (text, want) in cases {
            assert_eq!(rule(text), *want);
            assert_eq!(rule(want), *want, "a second time changes nothing");
            let other = in_other_places(text);
            assert_eq!(rule(&other), other);
        }
        for text in alone {
            assert_eq!(rule(text), *text);
        }
    }

    #[test]
    fn variables_and_fields_have_no_abbreviations() {
        let cases = [
            ("Err(err) => err.into()", "Err(error) => error.into()"),
            (
                "self.buf[idx..pos] != src.ptr",
                "self.buffer[index..position] != source.pointer",
            ),
            ("msg!=val", "message!=value"),
            ("tmp?", "temporary?"),
            ("$dst:expr", "$destination:expr"),
        ];
        let alone = [
            "cfg!(test)",
            "self.pos()",
            "ptr::null()",
            "std::ptr",
            "mod err;",
            "use ptr;",
            "use a::{\n    b, src,\n};",
            "fn idx<T>()",
            "'src",
            "r#ptr",
            "err_msg",
            "len(args, iter, i)",
            "\"{err}\"",
        ];
        check(names, &cases, &alone);
    }

    #[test]
    fn integers_have_a_fixed_width() {
        let cases = [
            ("x as usize + 1usize", "x as u64 + 1u64"),
            ("f::<isize>(-1_isize)", "f::<i64>(-1_i64)"),
            ("usize::MAX", "u64::MAX"),
        ];
        let alone = ["to_usize(AtomicUsize)", "usize_of", "x_0usize", "'usize"];
        check(integers, &cases, &alone);
    }

    #[test]
    fn the_team_has_its_own_macros() {
        let cases = [
            ("println!(x); eprint!{}", "info!(x); warn!{}"),
            (
                "assert!(a); assert_eq!(a, b); debug_assert_ne!(a, b)",
                "ensure!(a); ensure_eq!(a, b); check_ne!(a, b)",
            ),
            ("panic!(); unreachable!(); todo!()", "fatal!(); never!(); missing!()"),
            ("dbg![x]", "debug![x]"),
        ];
        let alone = [
            "std::panic!(x)",
            "my_assert!(x)",
            "panic(x)",
            "print != x",
            "print!=x",
            "write!(x)",
        ];
        check(macros, &cases, &alone);
    }

    #[test]
    fn a_value_that_must_be_there_is_said_to_be_checked() {
        let cases = [("f().unwrap().g()", "f().expect(\"checked\").g()")];
        check(expect, &cases, &["x.unwrap_or(y)", "x.unwrap", "unwrap()"]);
    }

    #[test]
    fn owned_strings_and_vectors_are_made_in_one_way() {
        let cases = [
            ("\"a\".to_string()", "String::from(\"a\")"),
            (
                "f(&\"a\\\"\".to_owned(), \"b\".into())",
                "f(&String::from(\"a\\\"\"), String::from(\"b\"))",
            ),
            ("\"ä\".into(), String::new()", "String::from(\"ä\"), String::default()"),
            ("let x = Vec::new();", "let x = vec![];"),
        ];
        for (text, want) in cases {
            assert_eq!(strings(text), want);
            assert_eq!(strings(want), want);
        }
        assert_eq!(strings("r#\"a\"#.into()"), "String::from(r#\"a\"#)");
        for text in [
            "x.to_string()",
            "b\"a\".to_owned()",
            "\"a\".into_iter()",
            "\"a\"\n    .into()",
            "SmallVec::new()",
            "alloc::vec::Vec::new()",
            "Vec::new",
            "// \"a\".into()",
            "#[x(\"a\".into(), Vec::new())]",
            "'\"'.to_string()",
        ] {
            assert_eq!(strings(text), text);
        }
    }
}
